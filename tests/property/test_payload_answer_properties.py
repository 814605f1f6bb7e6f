"""Answers made of parts whose renamed form is known by construction, cut at random places."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epp.payload.answer as answer_module
import epp.payload.renaming as renaming_module
from epp.payload import sse
from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage
from epp.payload.renaming import Renaming

ENGINE = "meta/llama-3"
CLIENT = 'al"ias'
SPELLINGS = ('"meta/llama-3"', '"meta\\/llama-3"', '"\\u006deta/llama-3"')
PLACE = '"\x7f"'
PLAIN_ANSWER = "plain"

texts = st.sampled_from(
    [
        "",
        "a",
        ENGINE,
        "model",
        '"model":"meta/llama-3"',
        "}{][",
        "\\",
        '"',
        "\n\n",
        "data: ",
        "é\u20ac",
        '"usage":{',
    ]
)
scalars = texts | st.integers(-5, 5) | st.booleans() | st.none()
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "usage", "a", "text", '"model"']), inner, max_size=3)
    ),
    max_leaves=6,
)
counts = st.integers(0, 1000)
usages = st.none() | st.builds(
    lambda prompt, output: {"prompt_tokens": prompt, "completion_tokens": output}, counts, counts
)
members = st.lists(
    st.tuples(st.sampled_from(["id", "choices", "x", 'a"b', "\\"]), nested),
    max_size=3,
    unique_by=lambda member: member[0],
)


@dataclass(frozen=True)
class Part:
    """A piece of an answer, as sent and as the client gets it, and the usage it carries."""

    sent: bytes
    renamed: bytes
    usage: Usage | None


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, str, Usage | None]:
    listed: list[tuple[str, Any]] = draw(members)
    usage = draw(usages)
    if draw(st.booleans()):
        listed.insert(draw(st.integers(0, len(listed))), ("usage", usage))
    else:
        usage = None
    if draw(st.integers(0, 4)):
        listed.insert(draw(st.integers(0, len(listed))), ("model", "\x7f"))
    written = json.dumps(
        dict(listed), ensure_ascii=False, separators=draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    )
    if draw(st.booleans()):
        written = written.replace(": " + PLACE, ":  " + PLACE)
    counted = None if usage is None else Usage(usage["prompt_tokens"], usage["completion_tokens"])
    return (
        written.replace(PLACE, draw(st.sampled_from(SPELLINGS))),
        written.replace(PLACE, json.dumps(CLIENT)),
        counted,
    )


@st.composite
def event_parts(draw: st.DrawFn) -> Part:
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    space = draw(st.sampled_from(["", " "]))
    kind = draw(st.integers(0, 6))
    if kind == 0:
        comment = draw(
            st.sampled_from([": ping", "event: x", ': "usage"', "data: [DONE]", "data:", "retry: 5"])
        )
        raw = f"{comment}{end}{end}".encode()
        return Part(raw, raw, None)
    before, after, usage = draw(documents())
    lines = [f"data:{space}{before}", f"data:{space}{after}"]
    if kind == 1:
        lines = [line.replace('", "', f'",{end}data:{space} "') for line in lines]
    if kind == 2:
        lines = [f"id: 7{end}{line}{end}event: x" for line in lines]
    return Part(f"{lines[0]}{end}{end}".encode(), f"{lines[1]}{end}{end}".encode(), usage)


@st.composite
def plain_parts(draw: st.DrawFn) -> Part:
    before, after, usage = draw(documents())
    return Part(before.encode(), after.encode(), usage)


streams = st.lists(event_parts(), min_size=1, max_size=5)
answers = st.tuples(st.just("text/event-stream"), streams) | st.tuples(
    st.just("application/json"), st.lists(plain_parts(), min_size=1, max_size=1)
)
cuts = st.lists(st.integers(0, 1000), max_size=8)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def check_renamed(kind: str, parts: list[Part], places: list[int], by_trailers: bool) -> None:
    reader = AnswerReader(Api.CHAT, CLIENT, ENGINE)
    assert reader.begin(200, kind, "")
    chunks = pieces(b"".join(part.sent for part in parts), places)
    given_bytes, forwarded = 0, b""
    for index, chunk in enumerate(chunks):
        given_bytes += len(chunk)
        forwarded += reader.feed(chunk, index == len(chunks) - 1 and not by_trailers)
        if reader.streaming:
            assert len(forwarded) >= length_of_whole_events(parts, given_bytes)
    forwarded += reader.finish()
    assert forwarded == b"".join(part.renamed for part in parts)
    assert reader.usage == last_usage(parts)


def check_unchanged(kind: str, parts: list[Part], places: list[int], by_trailers: bool) -> None:
    whole = AnswerReader(Api.CHAT, ENGINE, ENGINE)
    whole.begin(200, kind, "")
    whole.feed(b"".join(part.sent for part in parts), True)
    reader = AnswerReader(Api.CHAT, ENGINE, ENGINE)
    assert not reader.begin(200, kind, "")
    chunks = pieces(b"".join(part.sent for part in parts), places)
    for index, chunk in enumerate(chunks):
        assert reader.feed(chunk, index == len(chunks) - 1 and not by_trailers) == chunk
    assert reader.finish() == b""
    assert reader.usage == whole.usage == last_usage(parts)
    assert reader.first_token == whole.first_token


def length_of_whole_events(parts: list[Part], given_bytes: int) -> int:
    length = 0
    for part in parts:
        given_bytes -= len(part.sent)
        if given_bytes < 0:
            break
        length += len(part.renamed)
    return length


def last_usage(parts: list[Part]) -> Usage | None:
    found = [part.usage for part in parts if part.usage is not None]
    return found[-1] if found else None


CHECKS = {"renamed": check_renamed, "unchanged": check_unchanged}


def over_many_answers(check: Callable[..., None], phases: tuple[Phase, ...], examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(answers, cuts, st.booleans())
    def run(answer: tuple[str, list[Part]], places: list[int], by_trailers: bool) -> None:
        check(*answer, places, by_trailers)

    run()


@pytest.mark.parametrize("check", CHECKS)
def test_any_cutting_gives_the_same_bytes_and_usage(check: str) -> None:
    over_many_answers(CHECKS[check], (Phase.generate, Phase.shrink), 250)


# -- faults that must be caught ------------------------------------------------------------------------


def replace_bytes(self: Renaming, event: bytes) -> bytes:
    return event.replace(b'"meta/llama-3"', json.dumps(CLIENT).encode())


def each_chunk_alone(self: AnswerReader, chunk: bytes, last: bool) -> bytes:
    passed = self._read_events(chunk)
    return chunk if self._renaming is None else passed


def first_line_only(event: bytes) -> bytes:
    return sse._DATA_LINE.findall(event)[0] if sse._DATA_LINE.findall(event) else b""


def line_feeds_only(text: bytes | bytearray, start: int = 0) -> int:
    return text.rfind(b"\n\n", start) + 2 if b"\n\n" in text[start:] else 0


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "bytes replaced wherever they stand": ("renamed", Renaming, "in_event", replace_bytes),
    "each piece of a stream read alone, renamed": ("renamed", AnswerReader, "_feed_events", each_chunk_alone),
    "each piece of a stream read alone": ("unchanged", AnswerReader, "_feed_events", each_chunk_alone),
    "only the first data line read": ("unchanged", sse, "data", first_line_only),
    "only line feeds end events": ("renamed", sse, "last_end", line_feeds_only),
    "braces in strings counted": (
        "renamed",
        renaming_module,
        "_NESTED_REST",
        renaming_module.re.compile(rb'[^"{}\[\]]*+(?:"[^"{}\[\]]*+)*+'),
    ),
    "nesting not counted": (
        "renamed",
        renaming_module.RenamedJson,
        "_nested",
        lambda self, text, position: len(text),
    ),
    "names compared as bytes": ("renamed", renaming_module, "_decoded", lambda value: None),
    "usage of a null counted": ("unchanged", answer_module, "usage_of", lambda document: Usage(0, 0)),
    "half a CRLF forgotten": ("renamed", sse, "LONGEST_BLANK_LINE", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        over_many_answers(CHECKS[check], (Phase.generate,), 1500)
