"""Explanations of decisions, from a running picker or from a file."""

from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import msgspec

from epp.errors import ConfigError, Problem, Unread, WarmrouteError
from epp.scheduling.explain import Explanation

DECISIONS_PATH = "/decisions"

_TIMEOUT_S = 5.0
_SHOWN_BYTES = 300


def fetch(admin: str, last: int, request_id: str | None) -> list[Explanation]:
    """The last decisions of the picker whose admin pages are at `admin`.

    Raises:
        WarmrouteError: it cannot be reached or answers something else.
    """
    if not admin.startswith(("http://", "https://")):
        raise WarmrouteError(f"--admin {admin}: write http://host:port")
    query = {"last": str(last)} | ({"request_id": request_id} if request_id else {})
    url = f"{admin.rstrip('/')}{DECISIONS_PATH}?{urlencode(query)}"
    try:
        # Admin pages are on loopback, where no proxy of the environment has any business.
        with build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as answer:
            data = answer.read()
    except HTTPError as error:
        shown = " ".join(error.read(_SHOWN_BYTES).decode(errors="replace").split())
        raise WarmrouteError(f"{url} answered {error.code}: {shown}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise WarmrouteError(
            f"no picker answers at {admin} ({reason}); --admin names another, --file reads one"
        ) from None
    try:
        return _decoded(data)
    except ValueError as error:
        raise WarmrouteError(f"{url} does not answer with decisions: {error}") from None


def read(file: Path) -> list[Explanation]:
    """Decisions that `warmroute explain --json` printed.

    Raises:
        ConfigError: the file cannot be read or is something else.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(str(file), Unread.because("", error)) from None
    try:
        return _decoded(data)
    except ValueError as error:
        raise ConfigError(str(file), Problem("", f"is not a recorded decision: {error}")) from None


def _decoded(data: bytes) -> list[Explanation]:
    """One explanation or a list of them. Raises ValueError."""
    try:
        if data.lstrip().startswith(b"["):
            return msgspec.json.decode(data, type=list[Explanation])
        return [msgspec.json.decode(data, type=Explanation)]
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
