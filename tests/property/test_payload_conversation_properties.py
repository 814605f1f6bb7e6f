"""Conversations in three APIs: texts have one identity, and what goes on keeps its prefix."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epp.payload.anthropic as anthropic_module
import epp.payload.identity as identity_module
import epp.payload.openai as openai_module
from epp.payload.records import RawRequest
from epp.payload.request import parse_request

words = st.sampled_from(["", "a", "b", "ab", "é\n", '"\\'])
roles = st.sampled_from(["user", "assistant"])
texts = st.tuples(roles, words)
blocks = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, words),
    st.builds(lambda name: {"type": "tool_use", "id": name, "name": name, "input": {"a": [1]}}, words),
    st.builds(lambda text: {"type": "tool_result", "tool_use_id": "1", "content": text}, words),
    st.builds(
        lambda text, url: {
            "type": "tool_result",
            "tool_use_id": "1",
            "content": [
                {"type": "text", "text": text},
                {"type": "image", "source": {"type": "url", "url": url}},
            ],
        },
        words,
        st.sampled_from(["x", "y"]),
    ),
    st.builds(lambda data: {"type": "image", "source": {"type": "base64", "data": data}}, st.just("QUJD")),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, words),
)
turns = st.builds(
    lambda role, content: {"role": role, "content": content}, roles, words | st.lists(blocks, max_size=3)
)
calls = st.builds(lambda name: {"type": "function_call", "call_id": "1", "name": name}, words)
items = calls | st.builds(
    lambda role, text, kind: {"type": "message", "role": role, "content": [{"type": kind, "text": text}]},
    roles,
    words,
    st.sampled_from(["input_text", "output_text"]),
)


def identity(path: str, **members: Any) -> bytes:
    raw = RawRequest("id", "POST", path, (), json.dumps(members).encode())
    (prompt,) = parse_request(raw, max_bytes=1 << 20).request.prompts
    return prompt


def chat(messages: list[Any]) -> bytes:
    return identity("/v1/chat/completions", messages=messages)


def messages(turns: list[Any], system: Any = None) -> bytes:
    return identity("/v1/messages", messages=turns, system=system)


def response(items: Any, instructions: str | None = None) -> bytes:
    return identity("/v1/responses", input=items, instructions=instructions)


def marked(turn: dict[str, Any]) -> dict[str, Any]:
    """With the mark of where the client wants its cache to end."""
    if not turn["content"] or isinstance(turn["content"], str):
        return turn
    *before, last = turn["content"]
    return {**turn, "content": [*before, {"cache_control": {"type": "ephemeral"}, **last}]}


def check_alike(told: list[tuple[str, str]], system: str) -> None:
    """One conversation of texts, asked in every API and spelling."""
    plain = [{"role": role, "content": text} for role, text in told]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in told]
    outs = [
        {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}
        for role, text in told
    ]
    head = [{"role": "system", "content": system}] if system else []
    blocks = [{"type": "text", "text": system}] if system else []
    expected = chat([*head, *plain])
    assert chat([*head, *parts]) == expected
    assert messages(plain, system) == messages(parts, blocks) == expected
    assert response(plain, system) == response([*head, *outs]) == expected
    if not head and len(told) == 1 and told[0][0] == "user":
        assert response(told[0][1]) == expected


def check_blocks(turns: list[Any], more: Any) -> None:
    whole = messages([*turns, more], "s")
    for length in range(1, len(turns) + 1):
        *before, last = turns[:length]
        assert whole.startswith(messages([*before, marked(last)], "s"))


def check_items(items: list[Any], more: Any) -> None:
    whole = response([*items, more], "s")
    for length in range(1, len(items) + 1):
        assert whole.startswith(response(items[:length], "s"))


CHECKS: dict[str, tuple[Callable[..., None], Any, Any]] = {
    "alike": (check_alike, st.lists(texts, min_size=1, max_size=3), words),
    "blocks": (check_blocks, st.lists(turns, min_size=1, max_size=3), turns),
    "items": (check_items, st.lists(items, min_size=1, max_size=3), items),
}


def over_many(name: str, phases: tuple[Phase, ...], examples: int) -> None:
    check, first, second = CHECKS[name]

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


@pytest.mark.parametrize("name", CHECKS)
def test_property(name: str) -> None:
    over_many(name, (Phase.generate, Phase.shrink), 150)


# -- different conversations are told apart ------------------------------------------------------------


def result(*content: Any, name: str = "1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": list(content)}


A = {"type": "text", "text": "a"}
PICTURE = {"type": "image", "source": {"type": "url", "url": "a"}}
SMALL = [A, PICTURE, {"type": "a"}, result(), result(A), result(A, A), result(PICTURE), result(A, name="2")]


def check_told_apart() -> None:
    contents = [[one] for one in SMALL] + [[one, two] for one in SMALL for two in SMALL]
    said = [[{"role": "user", "content": content}] for content in contents]
    said += [
        [{"role": "user", "content": [one]}, {"role": "user", "content": [two]}]
        for one in SMALL
        for two in SMALL
    ]
    found = {messages(turns) for turns in said}
    assert len(found) == len(said)


def test_conversations_are_told_apart() -> None:
    check_told_apart()


# -- faults that must be caught ------------------------------------------------------------------------


def length_first(identity: bytearray, items: Any, media: Any) -> None:
    identity += len(bytes(items)).to_bytes(4, "little")
    identity_module.add_items(identity, items, media)


def as_other_role(identity: bytearray, content: Any, media: Any) -> None:
    identity_module.add_message(
        identity, identity_module.Message(identity_module.Raw(b"instructions"), content), media
    )


def with_roles_last(identity: bytearray, messages: Any, media: Any) -> None:
    for message in messages:
        identity_module.add_message(identity, identity_module.Message(content=message.content), media)
        identity += bytes(message.role)


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "instructions not as system": ("alike", openai_module, "add_system", as_other_role),
    "system not as a message": ("alike", anthropic_module, "add_system", as_other_role),
    "role after content": ("alike", anthropic_module, "add_messages", with_roles_last),
    "cache marks enter": ("blocks", identity_module, "_without_cache_control", lambda part: part),
    "length of the items first": ("items", openai_module, "add_items", length_first),
    "no end of results": ("apart", identity_module, "_END", b""),
    "results not told apart from text": ("apart", identity_module, "_add_tool_result", lambda *_: None),
    "pictures of results left out": ("apart", identity_module, "_add_source", lambda *_: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, broken = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, broken)
    run = check_told_apart if name == "apart" else lambda: over_many(name, (Phase.generate,), 600)
    with pytest.raises(AssertionError):
        run()
