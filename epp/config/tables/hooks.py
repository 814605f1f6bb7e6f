"""Types of hooks on requests and answers."""

from typing import Final

from epp.config.spec import Kind, KnownType, PluginSpec

BUILT_INS: Final[tuple[PluginSpec, ...]] = ()

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("disagg-headers-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
    KnownType("prefill-header-handler", Kind.REQUEST_HOOK, "disagg-profile-handler"),
    KnownType("request-attribute-reporter", Kind.RESPONSE_HOOK),
    KnownType("destination-endpoint-served-verifier", Kind.RESPONSE_HOOK),
    KnownType("agent-identity", Kind.REQUEST_HOOK),
)
