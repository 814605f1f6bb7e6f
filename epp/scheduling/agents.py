"""Which agent session a request belongs to, from the headers that coding agents send."""

from typing import Final

import msgspec

from epp.payload.records import RawRequest
from epp.scheduling.header_names import header_name
from epp.scheduling.ports import AGENT_IDENTITY, NO_ATTRIBUTES, Attributes

AGENT_SESSION_HEADERS: Final = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")


class AgentIdentityParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `agent-identity`.

    Attributes:
        additional_session_headers: looked at before the built-in ones, in this order.
    """

    additional_session_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.additional_session_headers:
            header_name(name)


class AgentIdentity:
    """`agent-identity`: the first session header that is there and not empty names the request's agent.

    The attribute serves as the fairness id where no header gives one, and as a source of session affinity.
    A header name with an underscore (`session_id`) passes only a proxy that lets such headers through.
    """

    def __init__(self, params: AgentIdentityParams) -> None:
        names = (
            *(header_name(name) for name in params.additional_session_headers),
            *AGENT_SESSION_HEADERS,
        )
        self._ranks = {name: rank for rank, name in enumerate(dict.fromkeys(names))}

    def read(self, raw: RawRequest) -> Attributes:
        ranks, best, found = self._ranks, len(self._ranks), ""
        for name, value in raw.headers:
            if value and name in ranks and ranks[name] <= best:
                best, found = ranks[name], value
        return {AGENT_IDENTITY: found} if found else NO_ATTRIBUTES
