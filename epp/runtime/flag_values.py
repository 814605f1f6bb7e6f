"""Values as the flags of Go pickers write them, and the flags that are known and refused."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from epp.config.schema import UNITS

_NUMBER: Final = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SIZE: Final = re.compile(rf"({_NUMBER})(k|K|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?[Bb]?")
_UNITS: Final[Mapping[str, int]] = MappingProxyType({**UNITS, "K": 1000})
MOST_TARGET_PORTS: Final = 8


class Size(int):
    """Bytes, written as `4194304`, `4Mi`, `4MiB` or `25MB` (25 x 10^6)."""

    __slots__ = ()
    expected: ClassVar[str] = "size"

    @classmethod
    def parse(cls, value: object) -> "Size":
        """Raises ValueError: it is no whole number of bytes in 63 bits; says what would be right."""
        found = _SIZE.fullmatch(str(value).strip())
        if found is not None:
            whole, _, part = found[1].partition(".")
            amount, left = divmod(int(whole + part) * _UNITS[found[2] or ""], 10 ** len(part))
            if not left and amount < 1 << 63:
                return cls(amount)
        raise ValueError(
            f"{value!r} is no size; write whole bytes with or without a unit, such as 10MiB or 25MB"
        )

    def __str__(self) -> str:
        return int.__repr__(self)


def target_ports(values: Iterable[str]) -> tuple[int, ...]:
    """Ports in comma-separated lists, each once, in the order they come.

    Raises:
        ValueError: one is no port.
    """
    ports: dict[int, None] = {}
    for value in values:
        for text in value.split(","):
            if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 65535:
                raise ValueError(f"{text!r} is no port; write numbers from 1 to 65535, separated by commas")
            ports[int(text)] = None
    return tuple(ports)


_LABEL_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL: Final = re.compile(rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}=(?:{_LABEL_NAME})?")


def selector_fault(text: str) -> str:
    """What is wrong with a selector, labels that must all be there: `key=value,key=value`; empty: nothing."""
    for part in text.split(","):
        if not _LABEL.fullmatch(part.strip()):
            return f"{part!r} is no label; write key=value, and commas between several"
    return ""


LOG_LEVELS: Final[Mapping[str, int]] = MappingProxyType({"error": -1, "info": 0, "debug": 1})
STACKTRACE_LEVELS: Final = ("info", "error", "panic")
TIME_ENCODINGS: Final = ("epoch", "millis", "nano", "iso8601", "rfc3339", "rfc3339nano")


def log_level(text: str) -> int:
    """The verbosity that `--zap-log-level` means; -1 = errors only.

    Raises:
        ValueError: it is no level.
    """
    if (named := LOG_LEVELS.get(text.lower())) is not None:
        return named
    if text.isascii() and text.isdecimal() and 0 < int(text) < 128:
        return int(text)
    raise ValueError(f"{text!r} is no log level; write debug, info, error or a whole number above 0")


_ENGINE_CONFIGS: Final = (
    "deprecated in the field and cannot be used; name the engine's metrics in {} of engineConfigs, "
    "a parameter of core-metrics-extractor in the configuration file"
)

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--total-queued-requests-metric": _ENGINE_CONFIGS.format("queuedRequestsSpec"),
        "--total-running-requests-metric": _ENGINE_CONFIGS.format("runningRequestsSpec"),
        "--kv-cache-usage-percentage-metric": _ENGINE_CONFIGS.format("kvUsageSpec"),
        "--lora-info-metric": _ENGINE_CONFIGS.format("loraSpec"),
        "--cache-info-metric": _ENGINE_CONFIGS.format("cacheInfoSpec"),
    }
)
"""Flags of the field that no value makes right, and why."""


def pool_of_pod(pod_name: str) -> str | None:
    """The pool's name where a selector chooses its pods: that of the Deployment the picker's pod is of.

    `<deployment>-<replica set>-<pod>` without its last two parts; None where the name has not three.
    """
    deployment = pod_name.rsplit("-", 2)[0]
    return deployment if deployment and pod_name.count("-") >= 2 else None
