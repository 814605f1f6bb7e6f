"""Profile handlers that do more than run the one profile."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from epp import names
from epp.errors import BadRequest
from epp.payload.records import find_header
from epp.pool.records import Mask
from epp.scheduling.header_names import header_name
from epp.scheduling.ports import Ctx
from epp.scheduling.profiles import Profile, serving_leg
from epp.scheduling.records import Edits, Leg, Ticket

# -- a profile chosen by header ---------------------------------------------------------------------

DEFAULT_PROFILE_HEADER: Final = "EPP-Profile"


class HeaderProfileHandlerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `header-profile-handler`; an empty text means the default.

    Attributes:
        header_name: request header that names the profile.
        default_profile: profile of requests without the header.
    """

    header_name: str = DEFAULT_PROFILE_HEADER
    default_profile: str = "decode"

    def __post_init__(self) -> None:
        header_name(self.header_name)


class HeaderProfileHandler:
    """`header-profile-handler`: runs the one profile that a header names; without the header the default one.

    Where there is one profile it always runs, whatever the header says. A header that names no profile is
    the client's mistake: 400, with the names there are (the field's picker answers 429, as if it were full).
    """

    def __init__(self, params: HeaderProfileHandlerParams, profiles: Mapping[str, Profile]) -> None:
        """Raises ValueError: there are several profiles, and the default is none of them."""
        self._header = header_name(params.header_name) or DEFAULT_PROFILE_HEADER.lower()
        self._default = params.default_profile.strip() or "decode"
        self._profiles = dict(profiles)
        self._only = next(iter(profiles.values())) if len(profiles) == 1 else None
        if self._only is None and self._default not in profiles:
            raise ValueError(
                f"defaultProfile {self._default!r} is not a configured scheduling profile; "
                f"configured: {', '.join(profiles)}"
            )

    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        return (serving_leg(self._only or self._named(ctx), ctx, alive),)

    def _named(self, ctx: Ctx) -> Profile:
        name = (find_header(ctx.headers, self._header) or "").strip() or self._default
        profile = self._profiles.get(name)
        if profile is None:
            raise BadRequest(
                f'header profile handler: no scheduling profile configured for "{self._header}" '
                f'header value "{name[:80]}"; configured: {", ".join(self._profiles)}'
            )
        return profile


# -- data-parallel ranks behind one port ------------------------------------------------------------


class DataParallelProfileHandlerParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"
):
    """Parameters of `data-parallel-profile-handler`: the port where each pod's sidecar listens."""

    primary_port: Annotated[int, Meta(ge=1, le=65535)] = 8000


class DataParallelProfileHandler:
    """`data-parallel-profile-handler`: sends to the primary port of the pod whose rank was chosen.

    The header `x-data-parallel-host-port` tells the sidecar there which rank: the first choice, also where a
    fallback is another pod's. Load and caches are those of the rank. A gateway that can send to any port of
    a pod (Istio from 1.28.1 on) does not need this; `single-profile-handler` is enough.
    """

    def __init__(self, params: DataParallelProfileHandlerParams, profiles: Mapping[str, Profile]) -> None:
        """Raises ValueError: there is more than one profile."""
        if len(profiles) != 1:
            raise ValueError(f"runs exactly one scheduling profile, not {', '.join(profiles) or 'none'}")
        (self._profile,) = profiles.values()
        self._port = params.primary_port

    def place(self, ctx: Ctx, alive: Mask) -> tuple[Leg, ...]:
        leg = serving_leg(self._profile, ctx, alive)
        primaries = tuple(msgspec.structs.replace(rank, port=self._port) for rank in leg.endpoints)
        return (Leg(leg.role, primaries, leg.decision),)

    def placed(self, ctx: Ctx, ticket: Ticket) -> Edits:
        rank = ctx.view.host_ports[ticket.placement.serving.decision.slots[0]]
        return ((names.DATA_PARALLEL_HOST_PORT, rank.encode()),)
