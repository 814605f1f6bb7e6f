"""What plugins say of their state: `/debug/plugins/state`, in the form of the field's picker."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from epp.config.load import Assembly

STATE_PATH: Final = "/debug/plugins/state"

_TIMEOUT_S: Final = 5.0


def plugin_state(assembly: Assembly, time_s: float) -> bytes:
    """`{"timestamp", "plugins": {NAME: {"name", "type", "state" or "message"}}}`.

    To be called on the thread that runs the plugins. `time_s`: now, in seconds since 1970.
    """
    entries = {name: _entry(name, assembly.types[name], made) for name, made in assembly.named.items()}
    timestamp = datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"timestamp": timestamp, "plugins": entries})


def _entry(name: str, kind: str, plugin: Any) -> dict[str, object]:
    entry: dict[str, object] = {"name": name, "type": kind}
    state = getattr(plugin, "state", None)
    if not callable(state):
        return {**entry, "message": "plugin does not support state collection"}
    try:
        return {**entry, "state": msgspec.Raw(msgspec.json.encode(state()))}
    except Exception as error:
        return {**entry, "message": f"failed to dump plugin state: {type(error).__name__}: {error}"}


class Kept:
    """A page that is made anew after `for_s` at the earliest, so that asking often costs no more."""

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float], for_s: float = 1.0) -> None:
        self._make = make
        self._clock = clock
        self._for_s = for_s
        self._made_at = -float("inf")
        self._page = b""

    def __call__(self) -> bytes:
        now = self._clock()
        if now - self._made_at >= self._for_s:
            self._page = self._make()
            self._made_at = now
        return self._page


def from_another_thread(make: Callable[[], bytes], loop: asyncio.AbstractEventLoop) -> Callable[[], bytes]:
    """`make` for callers on other threads: it runs on the loop's. Raises TimeoutError when that is stuck."""

    async def made() -> bytes:
        return make()

    return lambda: asyncio.run_coroutine_threadsafe(made(), loop).result(_TIMEOUT_S)
