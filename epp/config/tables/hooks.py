"""Types of hooks on requests and answers."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.scheduling.agents import AgentIdentity, AgentIdentityParams
from epp.scheduling.reporter import RequestAttributeReporter, RequestAttributeReporterParams
from epp.scheduling.served import ServedEndpointVerifier


def _agent_identity(context: BuildContext, params: AgentIdentityParams) -> AgentIdentity:
    return AgentIdentity(params)


def _reporter(context: BuildContext, params: RequestAttributeReporterParams) -> RequestAttributeReporter:
    return RequestAttributeReporter(params)


def _verifier(context: BuildContext, params: NoParameters) -> ServedEndpointVerifier:
    return ServedEndpointVerifier()


BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("agent-identity", Kind.REQUEST_HOOK, AgentIdentityParams, _agent_identity, Stability.ALPHA),
    PluginSpec(
        "request-attribute-reporter",
        Kind.RESPONSE_HOOK,
        RequestAttributeReporterParams,
        _reporter,
        Stability.STABLE,
    ),
    PluginSpec(
        "destination-endpoint-served-verifier", Kind.RESPONSE_HOOK, NoParameters, _verifier, Stability.BETA
    ),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("disagg-headers-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
    KnownType("prefill-header-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
)
