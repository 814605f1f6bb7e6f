"""Explanations of decisions, from a running picker or from a file."""

from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import msgspec

from epp.errors import ConfigError, Problem, WarmrouteError
from epp.runtime.admin import DECISIONS_PATH
from epp.scheduling.explain import Explanation

_TIMEOUT_S = 5.0


def fetch(admin: str, last: int, request_id: str | None) -> list[Explanation]:
    """The last decisions of the picker whose admin pages are at `admin`.

    Raises:
        WarmrouteError: it cannot be reached or answers something else.
    """
    query = {"last": str(last)} | ({"request_id": request_id} if request_id else {})
    url = f"{admin.rstrip('/')}{DECISIONS_PATH}?{urlencode(query)}"
    if not url.startswith(("http://", "https://")):
        raise WarmrouteError(f"--admin {admin}: write http://host:port")
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=list[Explanation])
    except HTTPError as error:
        raise WarmrouteError(
            f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}"
        ) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise WarmrouteError(
            f"no picker answers at {admin} ({reason}); --admin names another, --file reads one"
        ) from None
    except msgspec.DecodeError as error:
        raise WarmrouteError(f"{url} does not answer with decisions: {error}") from None


def read(file: Path) -> list[Explanation]:
    """Decisions that `warmroute explain --json` printed.

    Raises:
        ConfigError: the file cannot be read or is something else.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(str(file), Problem("", f"cannot be read: {error.strerror}")) from None
    try:
        if data.lstrip().startswith(b"["):
            return msgspec.json.decode(data, type=list[Explanation])
        return [msgspec.json.decode(data, type=Explanation)]
    except msgspec.DecodeError as error:
        raise ConfigError(str(file), Problem("", f"is not a recorded decision: {error}")) from None
