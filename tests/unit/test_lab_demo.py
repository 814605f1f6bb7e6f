"""What `warmroute demo` says of its two runs, whatever came of them: engines and clients are stand-ins."""

import json
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from epp.errors import ConfigError
from epp.lab import demo
from epp.lab.engine_server import EngineStats
from epp.lab.envoy import EnvoyError
from epp.lab.player import Answered
from epp.lab.realtime import LagSummary
from epp.lab.servers import FleetStats
from epp.lab.workload import Turn
from epp.payload.records import Usage

TURN = Turn(0, 0, None, 0.0, (("user", "hello"),), 8)
FAILED = Answered(TURN, 0.5, None, 1.0, None, "status 500")
CUT = Answered(TURN, 0.5, 9.0, 1.0, Usage(100, 999, 40), "the answer ended before its usage")


def answered(ttft_s: float, output_tokens: int = 8) -> Answered:
    return Answered(TURN, 0.5, ttft_s, 1.0, Usage(100, output_tokens, 40))


class Stack:
    """In the place of the real one; `lag` is that of its engines."""

    gateway_url, round_robin_url = "picker", "round robin"

    def __init__(self, lag: float, hits: int) -> None:
        self.engines = self
        self._lag, self._hits, self._resets = LagSummary(1, 0.0, 0.0, 0.0, 0.0, lag), hits, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._resets == 1

    async def reset(self) -> None:
        self._resets += 1

    async def stats(self) -> FleetStats:
        engines = [
            EngineStats(8000 + n, True, n, 0, 0, 0, n * 100, n * self._hits, 0, 0, 0, self._lag)
            for n in (1, 2)
        ]
        return FleetStats("m", 1.0, engines, self._lag)


def shown(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ours: list[Answered],
    theirs: list[Answered],
    *,
    lag: float = 0.0,
    hits: int = 25,
    trace: Path | None = None,
    drawn: bool = False,
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, the screen, and the figures in the file."""
    by_url = {"picker": ours, "round robin": theirs}

    async def play(turns: Any, *, url: str, **rest: Any) -> list[Answered]:
        return by_url[url]

    monkeypatch.setattr(demo, "Stack", lambda *given, **rest: Stack(lag, hits))
    monkeypatch.setattr(demo, "play", play)
    if not drawn:
        monkeypatch.setattr(demo, "side_by_side", lambda path, *rest: None)
    monkeypatch.setattr(demo, "find_envoy", lambda given: Path("envoy"))
    options = demo.DemoOptions(
        small_workload(tmp_path), tmp_path / "demo.png", json_file=tmp_path / "demo.json", trace=trace
    )
    with (tmp_path / "screen").open("w+") as screen:
        status = demo.demo(options, Console(file=screen, width=120))
        screen.seek(0)
        text = screen.read()
    assert options.picture.is_file() == drawn
    return status, text, json.loads((tmp_path / "demo.json").read_text())


def small_workload(tmp_path: Path, **fleet: int) -> Path:
    """The demo's with one short chat in each of two groups; fields of its fleet replaced."""
    content = json.loads(demo.DEMO_WORKLOAD.read_text())
    content["fleet"] |= fleet
    content["chats"] |= {"groups": 2, "chats": 2, "turns": [2, 2]}
    content["chats"] |= {name: [20, 20] for name in ("system_tokens", "question_tokens", "answer_tokens")}
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(content))
    return path


def trace(tmp_path: Path, *blocks: list[int]) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 4, "hash_ids": ids}
        for ids in blocks
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_figures_are_of_what_was_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = [answered(0.1, 6), answered(0.3, 10), CUT, FAILED]
    status, text, figures = shown(monkeypatch, tmp_path, ours, [answered(0.2)], lag=0.02)
    duration_free = {name: figures["warmroute"][name] for name in demo.Summary.__struct_fields__}
    del duration_free["output_tokens_per_s"]
    assert duration_free == {
        "ttft_p50_ms": 200.0,
        "ttft_p90_ms": 280.0,
        "hit_ratio": 0.25,
        "requests": 4,
        "errors": 2,
        "requests_per_engine": [1, 2],
        "lag_p99_share": 0.02,
    }
    assert figures["round_robin"]["errors"] == 0
    assert status == demo.REQUESTS_FAILED
    assert "warmroute: 2 requests failed" in text
    assert "of one infinite cache's" in text


@pytest.mark.parametrize(
    ("lag", "theirs", "expected"),
    [
        (0.0, [answered(0.2)], 0),
        (demo.MOST_LAG, [answered(0.2)], 0),
        (demo.MOST_LAG + 0.01, [answered(0.2)], demo.ENGINES_LAGGED),
        # What failed is told even where the machine was too busy.
        (demo.MOST_LAG + 0.01, [FAILED], demo.REQUESTS_FAILED),
    ],
)
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lag: float, theirs: list[Answered], expected: int
) -> None:
    status, text, _ = shown(monkeypatch, tmp_path, [answered(0.1)], theirs, lag=lag)
    assert status == expected
    assert ("lagged" in text) == (lag > demo.MOST_LAG)


def test_where_nothing_was_answered_the_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, text, figures = shown(monkeypatch, tmp_path, [FAILED, FAILED], [FAILED], drawn=True)
    assert status == demo.REQUESTS_FAILED
    assert "warmroute: 2 requests failed" in text
    assert figures["warmroute"]["ttft_p50_ms"] is None


def test_prompts_that_share_nothing_have_no_share_of_an_infinite_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, text, figures = shown(
        monkeypatch, tmp_path, [answered(0.1)], [answered(0.2)], hits=0, trace=trace(tmp_path, [1], [2])
    )
    assert status == 0
    assert figures["warmroute"]["infinite_cache_hit_ratio"] == 0.0
    assert "cache hit ratio" in text
    assert "infinite cache" not in text


def _no_envoy(given: Path | None) -> Path:
    raise EnvoyError("none")


def test_a_trace_needs_engines_that_hold_a_prompt_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = small_workload(tmp_path, max_model_len=128, num_blocks=20)
    few = demo.DemoOptions(workload, tmp_path / "demo.png", trace=trace(tmp_path, [1]))
    with pytest.raises(ConfigError, match=r"max_model_len: must be at least 129 for a trace"):
        demo.demo(few, Console(quiet=True))
    monkeypatch.setattr(demo, "find_envoy", _no_envoy)
    small_workload(tmp_path, max_model_len=129, num_blocks=20)
    with pytest.raises(EnvoyError):
        demo.demo(few, Console(quiet=True))
