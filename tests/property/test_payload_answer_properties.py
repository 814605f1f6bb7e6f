"""Answers of every HTTP API, made of parts whose renamed form is known by construction, cut anywhere."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epp.payload.renaming as renaming_module
import epp.payload.usage as usage_module
from epp.payload import sse
from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage
from epp.payload.renaming import RenamedJson, Renaming
from epp.payload.shapes import SHAPES

ENGINE = "meta/llama-3"
CLIENT = 'al"ias'
SPELLINGS = ('"meta/llama-3"', '"meta\\/llama-3"', '"\\u006deta/llama-3"')
PLACE = '"\x7f"'
SSE, JSON = "text/event-stream", "application/json"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

IN_MEMBER = {Api.RESPONSES: "response", Api.CONVERSATIONS: "response", Api.MESSAGES: "message"}
WITHOUT_MODEL = (Api.SGLANG_GENERATE, Api.IMAGES)
WITHOUT_USAGE = (Api.CHAT_RENDER, Api.COMPLETIONS_RENDER)
READ = [api for api, shape in SHAPES.items() if shape.read]
RENAMED = [api for api in READ if api not in WITHOUT_MODEL]

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
        "[DONE]",
    ]
)
scalars = texts | st.integers(-5, 5) | st.booleans() | st.none()
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "usage", "a", "text", '"model"']), inner, max_size=3)
    ),
    max_leaves=4,
)
counts = st.integers(0, 1000)
members = st.lists(
    st.tuples(st.sampled_from(["id", "choices", "x", 'a"b', "\\", "delta", "text"]), nested),
    max_size=3,
    unique_by=lambda member: member[0],
)
TYPES = ["content_block_delta", "message_delta", "response.output_text.delta", "response.created", "x"]


def told(*names: str) -> st.SearchStrategy[dict[str, int]]:
    return st.lists(st.tuples(st.sampled_from(names), counts), max_size=4).map(dict)


MESSAGE_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
USAGES = {
    Api.MESSAGES: told(*MESSAGE_COUNTS),
    Api.RESPONSES: told("input_tokens", "output_tokens"),
    Api.SGLANG_GENERATE: told("prompt_tokens", "completion_tokens", "cached_tokens"),
}
openai_usages = told("prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class Part:
    """A piece of an answer, as sent and as the client gets it, and the counts it tells, by output."""

    sent: bytes
    renamed: bytes
    told: tuple[tuple[int, dict[str, int]], ...] = ()


@dataclass(frozen=True)
class Answered:
    api: Api
    content_type: str
    parts: tuple[Part, ...]

    @property
    def sent(self) -> bytes:
        return b"".join(part.sent for part in self.parts)


@st.composite
def documents(draw: st.DrawFn, api: Api, event: bool) -> tuple[str, str, tuple[int, dict[str, int]] | None]:
    """An object with a model of its own, or in a member; before and after; and what it tells."""
    listed: list[tuple[str, Any]] = draw(members)
    counted = draw(USAGES.get(api, openai_usages)) if draw(st.integers(0, 5)) else None
    index = draw(st.integers(0, 2)) if event and api is Api.SGLANG_GENERATE else 0
    if draw(st.integers(0, 3)):
        name = "meta_info" if api is Api.SGLANG_GENERATE else "usage"
        listed.insert(draw(st.integers(0, len(listed))), (name, counted))
    else:
        counted = None
    if draw(st.integers(0, 4)):
        listed.insert(draw(st.integers(0, len(listed))), ("model", "\x7f"))
    document: dict[str, Any] = dict(listed)
    if event and api in IN_MEMBER:
        around = draw(members) + ([("model", ENGINE)] if draw(st.booleans()) else [])
        around.insert(draw(st.integers(0, len(around))), (IN_MEMBER[api], document))
        document = dict(around)
    if event and draw(st.booleans()):
        document["type"] = draw(st.sampled_from(TYPES))
    if index:
        document["index"] = index
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    written = json.dumps(document, ensure_ascii=False, separators=separators)
    if draw(st.booleans()):
        written = written.replace(": " + PLACE, ":  " + PLACE)
    before = written.replace(PLACE, draw(st.sampled_from(SPELLINGS)))
    after = written.replace(PLACE, json.dumps(CLIENT)) if api in RENAMED else before
    return before, after, None if counted is None else (index, counted)


@st.composite
def event_parts(draw: st.DrawFn, api: Api) -> Part:
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    space = draw(st.sampled_from(["", " "]))
    kind = draw(st.integers(0, 6))
    if kind == 0:
        comment = draw(
            st.sampled_from([": ping", "event: x", ': "usage"', "data: [DONE]", "data:", "retry: 5"])
        )
        raw = f"{comment}{end}{end}".encode()
        return Part(raw, raw)
    before, after, counted = draw(documents(api, event=True))
    lines = [f"data:{space}{before}", f"data:{space}{after}"]
    if kind == 1:
        lines = [re.sub(r',( ?")', rf",{end}data:{space}\1", line) for line in lines]
    if kind == 2:
        lines = [f"id: 7{end}{line}{end}event: x" for line in lines]
    said = () if counted is None else (counted,)
    return Part(f"{lines[0]}{end}{end}".encode(), f"{lines[1]}{end}{end}".encode(), said)


@st.composite
def plain_parts(draw: st.DrawFn, api: Api) -> Part:
    listed = api in (Api.COMPLETIONS_RENDER, Api.SGLANG_GENERATE) and draw(st.booleans())
    if not listed:
        before, after, counted = draw(documents(api, event=False))
        return Part(before.encode(), after.encode(), () if counted is None else (counted,))
    found = draw(st.lists(documents(api, event=False), max_size=3))
    separator = draw(st.sampled_from([",", " ,\n "]))
    sent, renamed = (f"[{separator.join(item[side] for item in found)}]" for side in (0, 1))
    said = tuple((number, item[2][1]) for number, item in enumerate(found) if item[2] is not None)
    return Part(sent.encode(), renamed.encode(), said)


@st.composite
def answers(draw: st.DrawFn, apis: list[Api]) -> Answered:
    api = draw(st.sampled_from(apis))
    if draw(st.integers(0, 3)):
        content_type, parts = SSE, draw(st.lists(event_parts(api), min_size=1, max_size=4))
    else:
        content_type, parts = JSON, [draw(plain_parts(api))]
    first, *others = parts
    mark = draw(st.sampled_from([b"", b"", b"", BYTE_ORDER_MARK]))
    return Answered(api, content_type, (Part(mark + first.sent, mark + first.renamed, first.told), *others))


cuts = st.lists(st.integers(0, 1000), max_size=8)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


# -- what an answer tells, from its parts and bytes alone ----------------------------------------------


def expected_usage(answered: Answered) -> Usage | None:
    said = [each for part in answered.parts for each in part.told]
    match answered.api:
        case api if api in WITHOUT_USAGE:
            return None
        case Api.MESSAGES:
            return message_usage([counted for _, counted in said])
        case Api.SGLANG_GENERATE:
            by_index = {index: counted for index, counted in said if of_sglang(counted)}
            found = [of_sglang(counted) for counted in by_index.values()]
            return sum_of([usage for usage in found if usage is not None])
        case _:
            usages = [usage for _, counted in said if (usage := of_openai(counted))]
            return usages[-1] if usages else None


def of_openai(counted: dict[str, int]) -> Usage | None:
    prompt = counted.get("prompt_tokens", counted.get("input_tokens"))
    output = counted.get("completion_tokens", counted.get("output_tokens"))
    return None if prompt is None and output is None else Usage(prompt or 0, output or 0)


def of_sglang(counted: dict[str, int]) -> Usage | None:
    found = of_openai(counted)
    return found and Usage(found.prompt_tokens, found.output_tokens, counted.get("cached_tokens"))


def sum_of(usages: list[Usage]) -> Usage | None:
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    prompt, output = sum(u.prompt_tokens for u in usages), sum(u.output_tokens for u in usages)
    return Usage(prompt, output, sum(cached) if cached else None) if usages else None


def message_usage(said: list[dict[str, int]]) -> Usage | None:
    """The last object with all of the input gives the input; parts told beside are added where unknown."""
    inputs: dict[str, int] = {}
    output = None
    for counted in said:
        parts = {name: counted[name] for name in MESSAGE_COUNTS[:3] if name in counted}
        whole = "input_tokens" in parts and sum(parts.values()) > 0
        for name in MESSAGE_COUNTS[:3]:
            if whole:
                inputs.pop(name, None)
            if name in parts and name not in inputs:
                inputs[name] = parts[name]
        output = counted.get("output_tokens", output)
    if output is None and "input_tokens" not in inputs:
        return None
    return Usage(sum(inputs.values()), output or 0, inputs.get("cache_read_input_tokens"))


def events_in(data: bytes) -> int:
    text = data.removeprefix(BYTE_ORDER_MARK)
    lines = [line for line in re.split(rb"\r\n|\n|\r", text) if line.startswith(b"data:")]
    return len([line for line in lines if line[5:].strip() != b"[DONE]"])


def whole_parts(parts: Iterable[Part], given_bytes: int) -> int:
    return len([end for end in accumulate(len(part.sent) for part in parts) if end <= given_bytes])


def first_token_part(answered: Answered) -> int:
    """How many parts have passed with the first token, each part read as one piece."""
    reader = begun(answered, ENGINE)
    for number, part in enumerate(answered.parts, 1):
        reader.feed(part.sent, False)
        if reader.first_token:
            return number
    return len(answered.parts) + 1


# -- checks --------------------------------------------------------------------------------------------


def begun(answered: Answered, client: str) -> AnswerReader:
    reader = AnswerReader(answered.api, client, ENGINE)
    assert reader.begin(200, answered.content_type, "") is (client != ENGINE and answered.api in RENAMED)
    return reader


def check_renamed(answered: Answered, places: list[int], by_trailers: bool) -> None:
    reader = begun(answered, CLIENT)
    chunks = pieces(answered.sent, places)
    given_bytes, forwarded = 0, b""
    for index, chunk in enumerate(chunks):
        given_bytes += len(chunk)
        forwarded += reader.feed(chunk, index == len(chunks) - 1 and not by_trailers)
        if reader.streaming:
            whole = whole_parts(answered.parts, given_bytes)
            assert len(forwarded) >= sum(len(part.renamed) for part in answered.parts[:whole])
    forwarded += reader.finish()
    assert forwarded == b"".join(part.renamed for part in answered.parts)
    assert reader.usage == expected_usage(answered)
    assert reader.events == (events_in(answered.sent) if reader.streaming else 0)


def check_unchanged(answered: Answered, places: list[int], by_trailers: bool) -> None:
    reader = begun(answered, ENGINE)
    first = first_token_part(answered)
    chunks = pieces(answered.sent, places)
    given_bytes = 0
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1 and not by_trailers
        given_bytes += len(chunk)
        assert reader.feed(chunk, last) == chunk
        if reader.streaming:
            whole = whole_parts(answered.parts, given_bytes)
            assert reader.first_token is (whole >= first)
            assert reader.events == sum(events_in(part.sent) for part in answered.parts[:whole])
    assert reader.finish() == b""
    assert reader.usage == expected_usage(answered)
    assert reader.events == (events_in(answered.sent) if reader.streaming else 0)


def check_cut_off(answered: Answered, places: list[int], by_trailers: bool) -> None:
    *chunks, _ = pieces(answered.sent, places or [1])
    reader = begun(answered, ENGINE)
    forwarded = b"".join(reader.feed(chunk, False) for chunk in chunks)
    reader.finish() if by_trailers else reader.feed(b"", True)
    assert reader.events == (events_in(forwarded) if reader.streaming else 0)
    once = begun(answered, ENGINE)
    once.feed(forwarded, True)
    assert (reader.usage, reader.first_token) == (once.usage, once.first_token)


CHECKS = {"renamed": check_renamed, "unchanged": check_unchanged, "cut off": check_cut_off}


def over_many_answers(
    check: Callable[..., None], phases: tuple[Phase, ...], examples: int, apis: list[Api] = READ
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(answers(apis), cuts, st.booleans())
    def run(answered: Answered, places: list[int], by_trailers: bool) -> None:
        check(answered, places, by_trailers)

    run()


@pytest.mark.parametrize("check", CHECKS)
def test_any_cutting_gives_the_same_bytes_and_usage(check: str) -> None:
    """And the first token at the same event, and the same count of events."""
    over_many_answers(CHECKS[check], (Phase.generate, Phase.shrink), 120)


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


def never_entered(self: RenamedJson, key: bytes, text: bytes, end: int) -> int:
    self._at = renaming_module._At.VALUE
    return end


def dropped(self: AnswerReader) -> bytes:
    self.release()
    return b""


FAULTS: dict[str, tuple[str, Any, str, Any, list[Api]]] = {
    "bytes replaced wherever they stand": ("renamed", Renaming, "in_event", replace_bytes, READ),
    "each piece of a stream read alone, renamed": (
        "renamed",
        AnswerReader,
        "_feed_events",
        each_chunk_alone,
        READ,
    ),
    "each piece of a stream read alone": ("unchanged", AnswerReader, "_feed_events", each_chunk_alone, READ),
    "only the first data line read": ("unchanged", sse, "data", first_line_only, [Api.CHAT]),
    "only line feeds end events": ("renamed", sse, "last_end", line_feeds_only, READ),
    "braces in strings counted": (
        "renamed",
        renaming_module,
        "_NESTED_REST",
        renaming_module.re.compile(rb'[^"{}\[\]]*+(?:"[^"{}\[\]]*+)*+'),
        [Api.CHAT],
    ),
    "nesting not counted": ("renamed", RenamedJson, "_nested", lambda self, text, at: len(text), READ),
    "names compared as bytes": ("renamed", renaming_module, "_decoded", lambda value: None, [Api.CHAT]),
    "usage of a null counted": ("unchanged", usage_module, "usage_of", lambda document: Usage(0, 0), READ),
    "half a CRLF forgotten": ("renamed", sse, "LONGEST_BLANK_LINE", 0, READ),
    "model inside a member not found": ("renamed", RenamedJson, "_entered", never_entered, READ),
    "only the first of a list renamed": (
        "renamed",
        RenamedJson,
        "_after_object",
        lambda self: renaming_module._At.DONE,
        [Api.COMPLETIONS_RENDER],
    ),
    "only the last usage of a message counted": (
        "unchanged",
        usage_module.MessageUsage,
        "_merged",
        lambda self, told: usage_module._usage(told),
        [Api.MESSAGES],
    ),
    "outputs not told apart": ("unchanged", usage_module, "MOST_OUTPUTS", 1, [Api.SGLANG_GENERATE]),
    "the end of a stream counted as an event": ("unchanged", sse, "DONE", b"[END]", READ),
    "one event for each piece": ("unchanged", sse, "data_line_count", lambda text: 1, READ),
    "an event that is cut off not counted": ("cut off", AnswerReader, "finish", dropped, READ),
    "carriage returns not seen": ("cut off", sse, "CARRIAGE_RETURN", 0, READ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, owner, name, broken, apis = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        over_many_answers(CHECKS[check], (Phase.generate,), 1500, apis)
