"""Who may read the metrics: asked of the API server, a TokenReview and then a SubjectAccessReview.

The permission is the one that scrapers of the field's picker have: `get` on the non-resource URL `/metrics`.
It stands for everything on that port.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final, Literal
from weakref import WeakValueDictionary

import msgspec

from epp.runtime.kube.api import KubeApi, KubeError
from epp.runtime.kube.told import Told
from epp.runtime.metrics_server import Authorize, Refusal

log = logging.getLogger(__name__)

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

_PATH: Final = "/metrics"
_VERB: Final = "get"
_FORBIDDEN: Final = 403
_KEPT_S: Final = {"ok": 60.0, "forbidden": 10.0, "unauthenticated": 10.0, "unknown": 1.0}
_MOST_KEPT: Final = 1024
"""Of each kind: whoever can reach the port can send new tokens, which are not to drive out the good ones."""
_AT_ONCE: Final = 4
"""Reviews under way. Of new tokens the API server is not to notice many, nor those who were let in before."""
_PATIENCE_S: Final = 8.0
"""How long a reader waits for reviews; scrapers give up after ten by default."""

Outcome = Literal["ok", "unauthenticated", "forbidden", "unknown"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What became of a token.

    Attributes:
        outcome: `unknown`: the API server could not be asked.
        user: whose token it is; empty unless that was found out.
        reason: why not; empty: not said.
    """

    outcome: Outcome
    user: str = ""
    reason: str = ""


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()
    error: str = ""


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True, rename="camel"):
    allowed: bool = False
    reason: str = ""
    evaluation_error: str = ""


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


_Kept = dict[bytes, tuple[float, Allowed]]
"""By digest of the token: until when, and what; the oldest first. One that has ended says who was let in."""


class Reviews:
    """Answers for tokens, kept for a while by a digest of each; calls for one token share a review.

    Args:
        said: Hears once for each reason why the API server cannot be asked, and that it can again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        api: KubeApi,
        said: Callable[[str], None] = log.warning,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._told = Told(said)
        self._clock = clock
        self._granted: _Kept = {}
        self._refused: _Kept = {}
        self._under_way: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._turns_of_granted = asyncio.Semaphore(_AT_ONCE)

    async def allowed(self, token: str) -> Allowed:
        """Whether the token's owner may read the metrics. Never raises for what the server does."""
        if not token:
            return Allowed("unauthenticated", reason="no token")
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        known = self._known(digest)
        if known is not None:
            return known
        async with self._under_way.setdefault(digest, asyncio.Lock()):
            known = self._known(digest)
            if known is None:
                async with self._turns_of_granted if digest in self._granted else self._turns:
                    known = await self._review(token)
                self._keep(digest, known)
        return known

    def _known(self, digest: bytes) -> Allowed | None:
        until, known = self._granted.get(digest) or self._refused.get(digest) or (0.0, None)
        return known if known is not None and self._clock() < until else None

    def _keep(self, digest: bytes, found: Allowed) -> None:
        self._refused.pop(digest, None)
        before = self._granted.pop(digest, None)
        # Who was let in before the API server went away stays one of those.
        good = found.outcome == "ok" or (found.outcome == "unknown" and before is not None)
        kept = self._granted if good else self._refused
        while len(kept) >= _MOST_KEPT:
            del kept[next(iter(kept))]
        kept[digest] = self._clock() + _KEPT_S[found.outcome], found

    async def _review(self, token: str) -> Allowed:
        try:
            who = await self._who(token)
            if not who.authenticated:
                found = Allowed("unauthenticated", reason=who.error)
            else:
                may = await self._may(who.user)
                reason = may.reason or may.evaluation_error
                found = Allowed("ok" if may.allowed else "forbidden", who.user.username, reason)
        except (KubeError, msgspec.MsgspecError) as error:
            return self._unknown(error)
        self._told.over(_PATH, "metrics: tokens can be reviewed again")
        if found.outcome == "forbidden":
            log.info("metrics are not for this user", extra={"user": found.user, "reason": found.reason})
        return found

    async def _who(self, token: str) -> _TokenStatus:
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        answer = await self._api.send("POST", TOKEN_REVIEWS, asked)
        return msgspec.json.decode(answer, type=_TokenReview).status

    async def _may(self, user: _User) -> _AccessStatus:
        asked = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups or [],
                "extra": user.extra or {},
                "nonResourceAttributes": {"path": _PATH, "verb": _VERB},
            },
        }
        answer = await self._api.send("POST", ACCESS_REVIEWS, asked)
        return msgspec.json.decode(answer, type=_AccessReview).status

    def _unknown(self, error: KubeError | msgspec.MsgspecError) -> Allowed:
        # What a server says about a body that it did not like quotes it, and this one holds a token.
        match error:
            case KubeError(status=0):
                status, reason = 0, str(error)
            case KubeError():
                status, reason = (
                    error.status,
                    f"{error.verb} {error.path}: {error.status} {error.reason}".rstrip(),
                )
            case _:
                status, reason = -1, "an answer that is no review"
        if status == _FORBIDDEN:
            reason += (
                "; a ClusterRole for this service account is missing, with create on tokenreviews of "
                "authentication.k8s.io and on subjectaccessreviews of authorization.k8s.io"
            )
        self._told.trouble(_PATH, (type(error), status), f"metrics: tokens cannot be reviewed: {reason}")
        return Allowed("unknown", reason=reason)


def authorize_on_loop(reviews: Reviews, loop: asyncio.AbstractEventLoop) -> Authorize:
    """What `serve_metrics` asks, on threads of its own; the reviews run on `loop`."""

    def authorize(token: str | None) -> Refusal | None:
        if not token:
            return _UNAUTHORIZED
        asked = asyncio.run_coroutine_threadsafe(reviews.allowed(token), loop)
        try:
            allowed = asked.result(_PATIENCE_S)
        except (TimeoutError, CancelledError):
            asked.cancel()
            return _UNAVAILABLE
        return _refusal(allowed)

    return authorize


_UNAUTHORIZED: Final = Refusal("401 Unauthorized", "Unauthorized", (("WWW-Authenticate", "Bearer"),))
_UNAVAILABLE: Final = Refusal(
    "503 Service Unavailable", "The API server cannot be asked who may read this", (("Retry-After", "1"),)
)


def _refusal(allowed: Allowed) -> Refusal | None:
    match allowed.outcome:
        case "ok":
            return None
        case "unauthenticated":
            return _UNAUTHORIZED
        case "forbidden":
            return Refusal("403 Forbidden", f"Authorization denied for user {allowed.user}")
        case "unknown":
            return _UNAVAILABLE
