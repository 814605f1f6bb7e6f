"""Workload files and traces: what they say, and how they say what is wrong."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.lab import tokens
from epp.lab.demo import DEMO_WORKLOAD
from epp.lab.engine import Engine
from epp.lab.workload import (
    Turn,
    infinite_cache,
    infinite_cache_hit_ratio,
    load_workload,
    longest_chat_tokens,
    plan,
    read_mooncake_trace,
)


def demo_with(tmp_path: Path, **changes: Any) -> Path:
    """The demo's file with fields replaced, named by their path with `__` for a dot; None removes one."""
    content = json.loads(DEMO_WORKLOAD.read_text())
    for name, value in changes.items():
        *above, field = name.split("__")
        place = content
        for key in above:
            place = place[key]
        place[field] = value
        if value is None:
            del place[field]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(content))
    return path


def test_demo_workload_overflows_one_engine_and_fits_the_fleet() -> None:
    workload = load_workload(DEMO_WORKLOAD)
    fleet = workload.fleet
    for seed in (1, 2, 3):
        cache = infinite_cache(plan(workload, seed), fleet.block_size)
        assert 3 * fleet.cache_tokens < cache.held_tokens < 0.75 * fleet.engines * fleet.cache_tokens
        assert 0.85 < cache.hit_ratio < 0.97


def test_demo_engines_are_what_the_file_says() -> None:
    fleet = load_workload(DEMO_WORKLOAD).fleet
    engine = Engine(fleet.spec())
    assert (fleet.engines, engine.spec.num_blocks, engine.spec.block_size) == (8, 3201, 16)
    assert fleet.cache_tokens == 3200 * 16


def test_every_prompt_of_the_demo_fits_an_engine() -> None:
    workload = load_workload(DEMO_WORKLOAD)
    longest = longest_chat_tokens(workload.chats)
    sizes: dict[int, int] = {}
    for turn in plan(workload):
        asked = sum(tokens.token_count(tokens.from_chat([message])) for message in turn.messages)
        sizes[turn.chat] = sizes.get(turn.chat, 0) + asked + turn.output_tokens
    assert max(sizes.values()) <= longest <= workload.fleet.max_model_len


@pytest.mark.parametrize(("skew", "first"), [(0, range(5, 30)), (1.5, range(30, 57)), (5000, [57])])
def test_skew_says_how_much_more_the_first_group_gets(
    tmp_path: Path, skew: float, first: range | list[int]
) -> None:
    path = demo_with(tmp_path, chats__groups=4, chats__chats=60, chats__turns=[1, 1], chats__skew=skew)
    systems = Counter(turn.messages[0] for turn in plan(load_workload(path)))
    assert len(systems) == 4
    assert max(systems.values()) in first


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"fleet__fit": "gpu-9000"}, "$.fleet.fit", "llama-8b-h100"),
        ({"fleet__num_blocks": 12}, "$.fleet.num_blocks", "must be at least 513"),
        ({"fleet__max_model_len": 3000}, "$.fleet.max_model_len", "the longest chat possible"),
        ({"fleet__engines": 0}, "$.fleet.engines", ">= 1"),
        ({"fleet__speed_up": 0}, "$.fleet.speed_up", "> 0"),
        ({"chats__turns": [5, 4]}, "$.chats.turns", "the least, 5, is more than the most, 4"),
        ({"chats__think_s": [1]}, "$.chats.think_s", "`array` of length 2"),
        ({"chats__groups": 181}, "$.chats.groups", "more than the 180 chats"),
        ({"chats__groups": None}, "$.chats", "missing required field `groups`"),
        ({"chats__colour": "red"}, "$.chats", "unknown field `colour`"),
        ({"seed": "one"}, "$.seed", "Expected `int`"),
        ({"colour": "red"}, "", "Object contains unknown field `colour`"),
        ({"chats__turns": [4, 2**40]}, "$.fleet.max_model_len", "the longest chat possible"),
    ],
)
def test_wrong_workload_file_names_the_field(
    tmp_path: Path, changes: dict[str, Any], where: str, what: str
) -> None:
    path = demo_with(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_workload(path)
    assert caught.value.source == str(path)
    assert any(problem.path == where and what in problem.message for problem in caught.value.problems), str(
        caught.value
    )


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"name": "\xff"}'])
def test_unreadable_workload_file_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "workload.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="workload.json"):
        load_workload(path)
    with pytest.raises(ConfigError, match="workload.json"):
        read_mooncake_trace(path)


def trace(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def line(timestamp: float, blocks: list[int], tail: int = 512, output: int = 5) -> dict[str, Any]:
    length = (len(blocks) - 1) * 512 + tail
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": blocks}


def content(turn: Turn) -> str:
    ((role, text),) = turn.messages
    assert role == "user"
    return text


def test_equal_leading_ids_are_equal_leading_text(tmp_path: Path) -> None:
    path = trace(
        tmp_path, line(0, [0, 1, 2], tail=100), line(10, [0, 1, 3]), line(20, [4]), line(30, [0, 1, 2])
    )
    first, second, third, fourth = (content(turn) for turn in read_mooncake_trace(path))
    block = 512 * tokens.TOKEN_BYTES
    assert [len(text) for text in (first, second, third, fourth)] == [
        2 * block + 400,
        3 * block,
        block,
        3 * block,
    ]
    assert first[: 2 * block] == second[: 2 * block]
    assert first[2 * block :] != second[2 * block : 2 * block + 400]
    assert fourth.startswith(first)
    assert third != first[:block]
    assert third[16:64] not in first


def test_trace_hits_are_those_of_its_ids(tmp_path: Path) -> None:
    path = trace(tmp_path, line(0, [0, 1, 2]), line(10, [0, 1, 3]), line(20, [4]), line(30, [0, 1, 2]))
    turns = read_mooncake_trace(path)
    asked = sum(tokens.token_count(tokens.from_chat(turn.messages)) for turn in turns)
    # The two ids of the second prompt, and all three of the last one, are held; the template adds the rest.
    assert infinite_cache_hit_ratio(turns, 16) == pytest.approx((2 * 512 + 3 * 512) / asked, rel=0.01)


def test_arrivals_are_spread_within_their_timestamp_and_sped_up(tmp_path: Path) -> None:
    crowd = [line(3000, [number]) for number in range(20)]
    path = trace(tmp_path, line(0, [100]), *crowd, line(9000, [101]))
    turns = read_mooncake_trace(path, speed_up=2.0, seed=7)
    times = [turn.delay_s for turn in turns]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, 4.5)
    assert all(1.5 <= at <= 3.0 for at in times[1:-1])
    assert len(set(times)) == 22
    assert turns == read_mooncake_trace(path, speed_up=2.0, seed=7)
    assert times != [turn.delay_s for turn in read_mooncake_trace(path, speed_up=2.0, seed=8)]


def test_trace_can_be_cut(tmp_path: Path) -> None:
    path = trace(tmp_path, line(0, [0, 1], output=50), line(10, [2]), "not read\n")
    (turn, other) = read_mooncake_trace(path, limit=2, max_prompt_tokens=600, max_output_tokens=9)
    assert (len(content(turn)), turn.output_tokens) == (600 * 4, 9)
    assert (len(content(other)), other.output_tokens) == (512 * 4, 5)
    assert all(turn.after is None for turn in (turn, other))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("{\n", "line 2: "),
        ({"timestamp": 1, "input_length": 5, "output_length": 1}, "line 2: .*`hash_ids`"),
        ({**line(0, [1]), "input_length": 0}, "line 2: .*input_length"),
        ({**line(0, [1]), "output_length": "many"}, "line 2: .*output_length"),
        ({**line(0, [1]), "timestamp": -1}, "line 2: .*timestamp"),
        ('{"more": ' + "[" * 100_000 + "\n", "line 2: .*recursion"),
        (
            {**line(0, [1]), "input_length": 1000},
            "line 2: 1000 input tokens are 2 blocks of 512, but hash_ids holds 1",
        ),
    ],
)
def test_wrong_trace_line_is_named(tmp_path: Path, wrong: Any, what: str) -> None:
    path = trace(tmp_path, line(0, [0]), wrong, line(5, [0]))
    with pytest.raises(ConfigError, match=what) as caught:
        read_mooncake_trace(path)
    assert str(path) in str(caught.value)


def test_trace_without_requests_is_refused_and_blank_lines_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_mooncake_trace(trace(tmp_path, "\n"))
    assert len(read_mooncake_trace(trace(tmp_path, line(0, [0]), "\n", line(1, [1])))) == 2


def test_many_wrong_lines_are_reported_but_not_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_mooncake_trace(trace(tmp_path, *["[]\n"] * 50))
    assert len(caught.value.problems) == 10
