"""The one tree of errors.

WarmrouteError
├── RequestError            one request cannot be served; becomes an answer to the client
│   ├── BadRequest          400
│   ├── PayloadTooLarge     413
│   ├── Saturated           429   retry later
│   ├── InternalError       500
│   └── NoEndpoints         503   retry later
├── ConfigError             a file or flag is wrong; lists every problem found
├── PageError               an engine's metrics page cannot be read
├── NeedFailed              what a request needed to know could not be found out
└── ProtocolError           the peer broke the order of ext-proc messages
"""

from dataclasses import dataclass
from typing import ClassVar

from epp import names


class WarmrouteError(Exception):
    """Root of every error raised on purpose."""


class RequestError(WarmrouteError):
    """One request cannot be served. `message` is for the client: what was wrong, and what would be right.

    Attributes:
        code: what the field's metrics call it.
    """

    status: ClassVar[int]
    code: ClassVar[str]
    type: ClassVar[str]
    reason: ClassVar[str | None] = None
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(RequestError):
    status = 400
    code = "BadRequest"
    type = "invalid_request_error"


class PayloadTooLarge(RequestError):
    status = 413
    code = "PayloadTooLarge"
    type = "invalid_request_error"


class Saturated(RequestError):
    status = 429
    code = "ResourceExhausted"
    type = "rate_limit_error"
    reason = names.REJECTED_SATURATED
    retry_after_s = 1


class InternalError(RequestError):
    status = 500
    code = "Internal"
    type = "internal_error"


class NoEndpoints(RequestError):
    status = 503
    code = "ServiceUnavailable"
    type = "service_unavailable_error"
    reason = names.REJECTED_NO_ENDPOINTS
    retry_after_s = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a file: where (a path such as `$.plugins[2].parameters.blockSize`) and what."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class Unread(Problem):
    """A file could not be read. It need not change to be readable the next time."""

    @classmethod
    def because(cls, path: str, error: OSError | ValueError) -> "Unread":
        reason = getattr(error, "strerror", None) or str(error)
        return cls(path, f"cannot be read: {reason}")


class ConfigError(WarmrouteError):
    """A configuration source (file or flag) cannot be used. Carries all problems found in it."""

    def __init__(self, source: str, *problems: Problem) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))

    @property
    def unread(self) -> bool:
        """Something could not even be read."""
        return any(isinstance(problem, Unread) for problem in self.problems)


class PageError(WarmrouteError):
    """An engine's metrics page is not one."""


class NeedFailed(WarmrouteError):
    """What a request needed to know could not be found out; it is placed without.

    Attributes:
        reason: one of a few words, for metrics.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProtocolError(WarmrouteError):
    """The ext-proc peer sent a message that is not legal now. Ends that stream and no other."""
