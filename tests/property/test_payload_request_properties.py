"""Bodies built from parts, so that what must change and what must not is known by construction."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epp.payload.body as body_module
import epp.payload.identity as identity_module
import epp.payload.openai as openai_module
import epp.payload.request as request_module
from epp.payload.body import Read
from epp.payload.records import RawRequest
from epp.payload.request import Parsed, Rewritten, parse_request, rewrite_model

texts = st.text(st.sampled_from('ab"\\é\n{}[]'), max_size=6)
words = st.sampled_from(["", "a", "b", "ab", "user"])
media = st.sampled_from(["aaaa", "bbbb"])
parts = st.builds(lambda text: {"type": "text", "text": text}, words) | st.builds(
    lambda url: {"type": "image_url", "image_url": {"url": url}}, media
)
messages = st.builds(
    lambda role, content, calls: {
        "role": role,
        "content": content,
        **({"tool_calls": calls} if calls else {}),
    },
    words,
    words | st.none() | st.lists(parts, min_size=1, max_size=3),
    st.none() | st.lists(words, min_size=1, max_size=1),
)
chats = st.lists(messages, min_size=1, max_size=4)
heads = st.fixed_dictionaries(
    {},
    optional={"tools": st.lists(words, min_size=1, max_size=2), "chat_template": st.sampled_from(["x", "y"])},
)


def parse(body: bytes) -> Parsed:
    raw = RawRequest("id", "POST", "/v1/chat/completions", (), body)
    return parse_request(raw, max_bytes=1 << 20)


def identity(chat: list[Any], head: dict[str, Any]) -> bytes:
    return parse(json.dumps({**head, "messages": chat}).encode()).request.prompts[0]


def meaning(chat: list[Any], head: dict[str, Any]) -> str:
    """A text that is the same for two chats only if a template renders them the same."""
    told = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
            content = content[0]["text"]
        told.append([message["role"], content or "", message.get("tool_calls")])
    return json.dumps([told, head], sort_keys=True)


# -- properties ----------------------------------------------------------------------------------------

json_values = st.recursive(
    texts | st.integers() | st.floats(allow_nan=True) | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "a", "messages"]), inner, max_size=3)
    ),
    max_leaves=5,
)
other_members = st.lists(
    st.tuples(st.sampled_from(["tools", "metadata", "x", "user", "max_tokens", "stop"]), json_values),
    max_size=3,
)
blanks = st.sampled_from(["", " ", "\n\t"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str, str, str]:
    """What stands before the model's value, the value, what stands after it, and the model."""
    model = draw(texts)
    written = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in draw(other_members)]
    padding = draw(st.sampled_from([0, 5000]))
    turns = [*draw(chats), {"role": "user", "content": "x" * padding + draw(texts)}]
    written.insert(
        draw(st.integers(0, len(written))),
        '"messages":' + json.dumps(turns, ensure_ascii=draw(st.booleans())),
    )
    place = draw(st.integers(0, len(written)))
    key = draw(st.sampled_from(['"model"', '"mod\\u0065l"'])) + draw(blanks) + ":" + draw(blanks)
    before = draw(blanks) + "{" + "".join(member + "," for member in written[:place]) + key
    after = "".join("," + draw(blanks) + member for member in written[place:]) + draw(blanks) + "}"
    return before, json.dumps(model, ensure_ascii=draw(st.booleans())), after, model


def check_rewrite(built: tuple[str, str, str, str], target: str) -> None:
    before, value, after, model = built
    parsed = parse((before + value + after).encode())
    assert parsed.request.model == model
    rewritten = rewrite_model(parsed, target).body
    assert rewritten.startswith(before.encode())
    assert rewritten.endswith(after.encode())
    assert rewritten[len(before.encode()) : len(rewritten) - len(after.encode())] in spellings(target)
    again = parse(rewritten)
    assert again.request.model == target
    assert again.request.prompts == parsed.request.prompts


def spellings(text: str) -> set[bytes]:
    return {json.dumps(text, ensure_ascii=ascii_only).encode() for ascii_only in (False, True)}


def check_prefix(built: tuple[list[Any], dict[str, Any]], turn: Any) -> None:
    chat, head = built
    for length in range(1, len(chat)):
        assert identity(chat, head).startswith(identity(chat[:length], head))
    assert identity([*chat, turn], head).startswith(identity(chat, head))


def check_distinct() -> None:
    """Every chat of one or two small messages: identities are equal exactly where meanings are."""
    identities: dict[str, bytes] = {}
    for head in ({}, {"tools": ["a"]}, {"chat_template": "a"}):
        for chat in [[one] for one in SMALL] + [[one, two] for one in SMALL for two in SMALL]:
            found = identity(chat, head)
            assert identities.setdefault(meaning(chat, head), found) == found
    assert len(set(identities.values())) == len(identities)


def part(letter: str) -> dict[str, Any]:
    return {"type": "text", "text": letter}


def picture(letter: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": letter}}


SMALL_CONTENTS = [None, "", "a", "aa", [part("a")], [part("a"), part("a")], [picture("a")], [picture("b")]]
SMALL_CONTENTS += [[part("a"), picture("a")], [picture("a"), part("a")], [{"type": "a"}], [{"type": "b"}]]
SMALL = [
    {"role": role, "content": content, **({"tool_calls": ["a"]} if calls else {})}
    for role in ("", "a")
    for content in SMALL_CONTENTS
    for calls in (False, True)
]
headed_chats = st.tuples(chats, heads)
PROPERTIES: dict[str, tuple[Callable[..., None], Any, Any]] = {
    "rewrite": (check_rewrite, bodies(), texts),
    "prefix": (check_prefix, headed_chats, messages),
}


def over_many(name: str, phases: tuple[Phase, ...], examples: int) -> None:
    check, first, second = PROPERTIES[name]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(first, second)
    def run(one: Any, other: Any) -> None:
        check(one, other)

    run()


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    over_many(name, (Phase.generate, Phase.shrink), 200)


def test_chats_are_told_apart() -> None:
    check_distinct()


CHECKS: dict[str, Callable[[], None]] = {
    "rewrite": lambda: over_many("rewrite", (Phase.generate,), 1000),
    "prefix": lambda: over_many("prefix", (Phase.generate,), 1000),
    "distinct": check_distinct,
}

# -- faults that must be caught ------------------------------------------------------------------------


def first_hit(_: Any, read: Read[Any]) -> tuple[int, int]:
    start = read.source.find(b'"model":') + len(b'"model":')
    return start, start + len(bytes(read.body.model))


def written_anew(parsed: Parsed, target: str) -> Rewritten:
    return Rewritten(json.dumps({**json.loads(parsed.plain), "model": target}).encode(), ())


def unescaped(parsed: Parsed, target: str) -> Rewritten:
    start, end = parsed.model_span or (0, 0)
    return Rewritten(parsed.plain[:start] + b'"%s"' % target.encode() + parsed.plain[end:], ())


chat_identity = openai_module.chat_identity
add_message = identity_module.add_message


def with_an_end(chat: Any, media: Any) -> bytes:
    return chat_identity(chat, media) + b"\xff"


def with_a_length(chat: Any, media: Any) -> bytes:
    return len(chat.messages).to_bytes(4, "little") + chat_identity(chat, media)


def latest_first(chat: Any, media: Any) -> bytes:
    chat.messages.reverse()
    return chat_identity(chat, media)


def without_calls(identity: bytearray, message: Any, media: Any) -> None:
    message.tool_calls = body_module.ABSENT
    add_message(identity, message, media)


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "the first thing that looks like a model": ("rewrite", body_module.BodyReader, "_model_span", first_hit),
    "body decoded and written again": ("rewrite", request_module, "rewrite_model", written_anew),
    "name not escaped": ("rewrite", request_module, "rewrite_model", unescaped),
    "text as it is spelled": ("rewrite", body_module, "text_bytes", lambda raw: raw[1:-1]),
    "a mark after the last message": ("prefix", openai_module, "chat_identity", with_an_end),
    "a length before the first message": ("prefix", openai_module, "chat_identity", with_a_length),
    "latest message first": ("prefix", openai_module, "chat_identity", latest_first),
    "messages not told apart": ("distinct", identity_module, "_MESSAGE", b""),
    "role and content not told apart": ("distinct", identity_module, "_CONTENT", b""),
    "parts not told apart": ("distinct", identity_module, "_TEXT_PART", b""),
    "tool calls left out": ("distinct", identity_module, "add_message", without_calls),
    "media left out": ("distinct", identity_module, "_add_medium", lambda *_: True),
    "head left out": ("distinct", openai_module, "add_json", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, broken = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, broken)
    if attribute == "rewrite_model":
        monkeypatch.setitem(globals(), attribute, broken)
    with pytest.raises(AssertionError):
        CHECKS[name]()
