"""Load reports of Open Request Cost Aggregation (`xds.data.orca.v3`): an engine puts one beside its answer.

Three forms, told apart by the word in front: `TEXT cpu_utilization=0.3, named_metrics.x=1`, `JSON {...}`, and
`BIN` with the message in base64; the header `endpoint-load-metrics-bin` has the last without the word.
"""

import binascii
import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from epp import names
from epp.pool.records import LoadReport
from epp.wire.orca_pb2 import OrcaLoadReport

REPORT_BYTES: Final = 16 * 1024
FIGURES: Final = 64
"""Longest report that is read, and most figures that are taken of it."""

# Where engines put what routing knows by name: vLLM, Triton with TensorRT-LLM.
WAITING: Final = ("named_metrics.num_requests_waiting",)
RUNNING: Final = ("named_metrics.num_requests_running",)
KV_USAGE: Final = ("named_metrics.kv_cache_usage_perc", "named_metrics.kv_cache_utilization")

_json = msgspec.json.Decoder(dict[str, Any])


def read_load(name: str, value: bytes) -> LoadReport | None:
    """The report in a header of this name; None where it has no figure or cannot be read."""
    if len(value) > REPORT_BYTES:
        return None
    form, _, rest = (b"BIN", b"", value) if name == names.ENDPOINT_LOAD_METRICS_BIN else value.partition(b" ")
    found: dict[str, float] = {}
    try:
        for key, figure in _figures(form.upper(), rest.strip()):
            if math.isfinite(figure) and len(found) < FIGURES:
                found[key] = figure
    except (ValueError, OverflowError, DecodeError, msgspec.DecodeError, RecursionError):
        return None
    if not found:
        return None
    return LoadReport(
        waiting=_take(found, WAITING),
        running=_take(found, RUNNING),
        kv_usage=_take(found, KV_USAGE),
        attributes=found,
    )


def _figures(form: bytes, report: bytes) -> Iterator[tuple[str, float]]:
    """Raises ValueError, OverflowError, DecodeError, msgspec.DecodeError, RecursionError: other form."""
    match form:
        case b"TEXT":
            for pair in report.decode().split(","):
                key, _, figure = pair.partition("=")
                yield key.strip(), float(figure)
        case b"JSON":
            for key, value in _json.decode(report).items():
                yield from _flat(key, value)
        case b"BIN":
            binary = binascii.a2b_base64(report + b"=" * (-len(report) % 4))
            for field, value in OrcaLoadReport.FromString(binary).ListFields():
                yield from _flat(field.name, value)


def _flat(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """A figure, or those of a map under its name."""
    if isinstance(value, float | int):
        yield key, float(value)
    elif value is not None and not isinstance(value, str | list):
        for inner, figure in value.items():
            if isinstance(figure, float | int):
                yield f"{key}.{inner}", float(figure)


def _take(found: dict[str, float], keys: tuple[str, ...]) -> float | None:
    """Take the first of `keys` out. No load is below zero."""
    for key in keys:
        if key in found:
            figure = found.pop(key)
            return figure if figure >= 0 else None
    return None
