"""Every reader of foreign bytes is fuzzed, and its fuzzing would notice an error that escapes.

A fault is planted, off the usual path where there is one; the fuzz test must then fail with that very fault.
"""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).parents[1]


class Planted(Exception):
    """What must not escape."""


class Fuzz(NamedTuple):
    """A fuzz test, its arguments, and where the fault is planted."""

    file: str
    test: str
    args: dict[str, Any]
    at: str


FUZZED = {
    "request bodies": Fuzz(
        "property/test_payload_fuzz.py", "test_requests", {"seed": 0}, "epp.payload.body._mended_token"
    ),
    "compressed bodies": Fuzz(
        "property/test_payload_fuzz.py", "test_requests", {"seed": 0}, "epp.payload.encoding._broken"
    ),
    "answers": Fuzz(
        "property/test_payload_fuzz.py", "test_answers", {"seed": 0}, "epp.payload.usage.last_usage"
    ),
    "order of messages": Fuzz(
        "property/test_extproc_exchange.py",
        "test_any_order_of_events_raises_nothing_but_protocol_errors",
        {},
        "epp.extproc.exchange.Exchange._late",
    ),
    "messages": Fuzz(
        "unit/test_extproc_codec.py",
        "test_any_bytes_raise_nothing_but_protocol_errors",
        {},
        "epp.extproc.codec._subset",
    ),
    "conversations": Fuzz(
        "property/test_fuzz_line.py",
        "test_broken_conversations",
        {"seed": 0},
        "epp.extproc.answer_side.AnswerSide._pass_trailers",
    ),
    "conversations as bytes": Fuzz(
        "property/test_fuzz_line.py", "test_broken_bytes", {"seed": 0}, "epp.payload.body._mistyped"
    ),
    "metrics pages": Fuzz(
        "unit/test_pool_metrics_page_text.py",
        "test_garbage_never_escapes_as_another_error",
        {},
        "epp.pool.metrics_page._labels",
    ),
    "configuration text": Fuzz(
        "property/test_fuzz_config.py", "test_broken_text", {}, "epp.config.document._unparsable"
    ),
    "configuration values": Fuzz(
        "property/test_fuzz_config.py", "test_other_values", {"seed": 0}, "epp.config.decode.nearest"
    ),
    "endpoint files": Fuzz(
        "unit/test_runtime_discovery.py",
        "test_garbage_never_escapes_as_another_error",
        {},
        "epp.runtime.discovery._shown",
    ),
    "recorded decisions": Fuzz(
        "property/test_fuzz_files.py",
        "test_any_file_is_read_or_named_as_wrong",
        {"name": "decision"},
        "epp.scheduling.explain._match",
    ),
    "workload files": Fuzz(
        "property/test_fuzz_files.py",
        "test_any_file_is_read_or_named_as_wrong",
        {"name": "workload"},
        "epp.lab.workload._fleet_problems",
    ),
    "traces": Fuzz(
        "property/test_fuzz_files.py",
        "test_any_file_is_read_or_named_as_wrong",
        {"name": "trace"},
        "epp.lab.workload._text",
    ),
}


@pytest.mark.parametrize("reader", FUZZED)
def test_a_planted_fault_is_noticed(reader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fuzz = FUZZED[reader]
    module = import_module("tests." + fuzz.file.removesuffix(".py").replace("/", "."))
    run: Callable[..., None] = getattr(module, fuzz.test)
    wanted = inspect.signature(run).parameters

    def fault(*args: object, **more: object) -> None:
        raise Planted(reader)

    monkeypatch.setattr(fuzz.at, fault)
    with pytest.raises(Planted, match=f"^{reader}$"):
        run(**fuzz.args, **({"tmp_path": tmp_path} if "tmp_path" in wanted else {}))


@pytest.mark.parametrize("file", sorted({fuzz.file for fuzz in FUZZED.values()}))
def test_fuzzing_is_seeded(file: str) -> None:
    """No draw comes from the module's own generator, whose seed differs from run to run."""
    text = (TESTS / file).read_text()
    assert re.search(r"\bRandom\([^)]", text)
    assert not re.search(r"\brandom\.(?!Random\b)\w+\(", text)
    assert "Random()" not in text
