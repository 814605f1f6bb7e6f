import gzip
import json
import struct
import tracemalloc
import zlib
from typing import Any

import pytest

from epp.errors import BadRequest, PayloadTooLarge
from epp.payload.records import Api, RawRequest
from epp.payload.request import Parsed, parse_request, rewrite_model

LIMIT = 1 << 20
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IMAGE_TOKENS = 640 * 360 // 1024
VIDEO_TOKENS = 10 * 2 * IMAGE_TOKENS
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def parse(
    body: bytes | dict[str, Any], path: str = CHAT, method: str = "POST", limit: int = LIMIT, **headers: str
) -> Parsed:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    listed = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return parse_request(RawRequest("id", method, path, listed, sent), max_bytes=limit)


def chat(*messages: Any, **members: Any) -> bytes:
    return parse({"model": "m", "messages": list(messages), **members}).request.prompts[0]


def prompts(prompt: Any, **members: Any) -> tuple[bytes, ...]:
    return parse({"model": "m", "prompt": prompt, **members}, COMPLETIONS).request.prompts


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# -- what passes unread ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", CHAT, b""),
        ("OPTIONS", CHAT, b""),
        ("POST", "/upload", b"--x\r\nnot json"),
        ("POST", "/health", b"{}"),
        ("POST", "/v1/rerank", b'{"model":"e","query":"q","documents":["a"]}'),
        ("POST", "/v1/models", b""),
    ],
)
def test_what_is_no_known_api_passes_unread(method: str, path: str, body: bytes) -> None:
    parsed = parse(body, path, method)
    assert parsed.request.api is Api.PASSTHROUGH
    assert (parsed.request.model, parsed.request.prompts, parsed.request.prompt_tokens) == ("", (), 0)
    assert parsed.body is parsed.plain is body
    assert parsed.model_span is None
    assert rewrite_model(parsed, "other").body is body


# -- what is refused, and how it is said ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "start", "param"),
    [
        (CHAT, b"", "error unmarshaling request bodyMap: the body is empty", None),
        (CHAT, b"no healthy upstream", "error unmarshaling request bodyMap: ", None),
        (CHAT, b'{"model":"m"', "error unmarshaling request bodyMap: ", None),
        (CHAT, b'{"model":"m"} {}', "error unmarshaling request bodyMap: JSON is malformed", None),
        (CHAT, b"[1]", "error unmarshaling request bodyMap: expected `object`, got `array`", None),
        (CHAT, b'"x"', "error unmarshaling request bodyMap: ", None),
        (CHAT, b'{"x":' + b"[" * 100_000, "error unmarshaling request bodyMap: ", None),
        (CHAT, '{"model":"m"}'.encode("utf-16"), "error unmarshaling request bodyMap: ", None),
        (
            CHAT,
            b'{"model":"m"}',
            "invalid chat completions request: must have valid messages field",
            "messages",
        ),
        (
            CHAT,
            b'{"model":"m","messages":[]}',
            "invalid chat completions request: must have valid messages field",
            "messages",
        ),
        (
            CHAT,
            b'{"model":"m","messages":"hi"}',
            "invalid chat completions request: must have valid messages field",
            "messages",
        ),
        (
            CHAT,
            b'{"model":"m","messages":null}',
            "invalid chat completions request: must have valid messages field",
            "messages",
        ),
        (
            CHAT,
            b'{"model":"m","messages":[1]}',
            "invalid chat completions request: must have valid messages field",
            "messages",
        ),
        (COMPLETIONS, b'{"model":"m"}', "invalid completions request: must have prompt field", "prompt"),
        (COMPLETIONS, b'{"prompt":null}', "invalid completions request: must have prompt field", "prompt"),
        (COMPLETIONS, b'{"prompt":5}', "invalid completions request: must have prompt field", "prompt"),
        (COMPLETIONS, b'{"prompt":{}}', "invalid completions request: must have prompt field", "prompt"),
        (
            COMPLETIONS,
            b'{"prompt":["a",1]}',
            "invalid completions request: must have prompt field: prompt[1]",
            "prompt",
        ),
        (CHAT, b'{"model":7,"messages":[{}]}', "model not found in request body", "model"),
        (CHAT, b'{"model":["m"],"messages":[{}]}', "model not found in request body", "model"),
    ],
)
def test_refusals_name_what_was_wrong(path: str, body: bytes, start: str, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body, path)
    assert refused.value.message.startswith(start)
    assert refused.value.param == param
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("padding", [0, 10_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"model":"a","model":"b",%s}',
        '{"model":"a",%s,"model":"a"}',
        '{"mod\\u0065l":"a",%s,"model":"b"}',
        '{%s,"model":"b","\\u006Dodel" : "a"}',
        '{%s,"model" : null,"model"\n:"a"}',
        '{"model":"a","x":NaN,%s,"model":"a"}',
        '\ufeff{"model":"a",%s,"model":"a"}',
    ],
)
def test_two_models_are_refused(body: str, padding: int) -> None:
    messages = json.dumps({"messages": [user("x" * padding)]})[1:-1]
    with pytest.raises(BadRequest, match="duplicate `model`") as refused:
        parse((body % messages).encode())
    assert refused.value.param == "model"


@pytest.mark.parametrize("padding", [0, 10_000])
@pytest.mark.parametrize(
    "other",
    [
        '"tools":[{"function":{"parameters":{"properties":{"model":{"type":"string"}},"required":["model"]}}}]',
        '"metadata":{"model":"b","inner":{"model":"c"}}',
        '"user":"model"',
        '"user":"\\"model\\":\\"b\\""',
        '"user":"x\\"model"',
        '"user":"\\u006dodel"',
        '"\\u006d":1',
        '"seed":1,"seed":2',
    ],
)
def test_a_model_elsewhere_is_no_second_model(other: str, padding: int) -> None:
    messages = json.dumps({"messages": [user("x" * padding)]})[1:-1]
    for body in (f'{{"model":"a",{other},{messages}}}', f'{{{other},{messages}, "mod\\u0065l" :\n"a" }}'):
        parsed = parse(body.encode())
        assert parsed.request.model == "a"
        assert parsed.model_span is not None
        start, end = parsed.model_span
        assert parsed.plain[start:end] == b'"a"'


# -- bodies that engines accept and strict readers do not ----------------------------------------------


@pytest.mark.parametrize(
    "member",
    [
        '"x":NaN',
        '"x":[Infinity,-Infinity]',
        '"x":1e400',
        '"x":' + "9" * 5000,
        '"x":"\\ud83d"',
        '"x":"\\udc00\\ud83d"',
        '"x":"\\\\ud83d \\ud83d\\u0041"',
        '"\\ud83d":1',
        '"stop":"x"',
        '"stop":["x"]',
        '"stream":"true"',
        '"stream":[]',
        '"max_tokens":null',
        '"max_tokens":{}',
        '"max_tokens":-1',
        '"max_tokens":1e400',
        '"n":2',
        '"tools":7',
        '"cache_salt":5',
        '"vllm_xargs":{"k":1}',
        '"messages":[{"role":"x"}]',
    ],
)
def test_members_of_no_interest_refuse_nothing(member: str) -> None:
    body = f'{{{member},"model":"alias","messages":[{{"role":"user","content":"hello"}}]}}'.encode()
    parsed = parse(body)
    assert parsed.request.model == "alias"
    assert parsed.body is body
    assert rewrite_model(parsed, "other").body == body.replace(b'"alias"', b'"other"')


def test_numbers_and_order_survive_a_rewrite() -> None:
    body = (
        b'{"model":"alias","seed":9007199254740993,"temperature":1.0,"x":1e400,"a":1,"a":2,"n":"\\u00e9",'
        b'"messages":[{"role":"user","content":"alias"}]}'
    )
    assert rewrite_model(parse(body), "other").body == body.replace(b'"alias"', b'"other"', 1)


def test_half_a_surrogate_pair_keeps_the_prefix_of_earlier_turns() -> None:
    first = chat(user("hello"))
    cut = parse(
        b'{"model":"m","messages":[{"role":"user","content":"hello"},'
        b'{"role":"user","content":"cut \\ud83d"}]}'
    )
    assert cut.request.prompts[0].startswith(first)
    assert cut.request.prompts[0].endswith("cut \ufffd".encode())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\xed\xa0\x80", b"\\n\xed\xa0\x80", b"\\n\xff"])
def test_text_that_is_not_utf8_is_routed(content: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"' + content + b'"}]}'
    assert parse(body).request.prompts
    assert parse(b'{"model":"' + content + b'","prompt":"x"}', COMPLETIONS).request.model.encode()


def test_byte_order_mark_is_skipped() -> None:
    parsed = parse(b"\xef\xbb\xbf" + json.dumps(HELLO).encode())
    assert parsed.request.prompts == parse(HELLO).request.prompts
    assert rewrite_model(parsed, "other").body.startswith(b'\xef\xbb\xbf{"model": "other", ')


# -- members -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"messages": [user("x")]}, {"model": None, "messages": [user("x")]}])
def test_absent_model_is_left_to_the_director(body: dict[str, Any]) -> None:
    parsed = parse(body)
    assert parsed.request.model == parsed.request.target_model == ""
    assert json.loads(rewrite_model(parsed, "named").body) == {**body, "model": "named"}


def test_empty_model_is_a_value() -> None:
    parsed = parse({"model": "", "messages": [user("x")]})
    assert parsed.request.model == ""
    assert json.loads(rewrite_model(parsed, "named").body)["model"] == "named"


@pytest.mark.parametrize(
    ("members", "limit"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": True}, None),
        ({"max_tokens": 1.5}, None),
        ({"max_tokens": "7"}, None),
        ({"max_tokens": 10**30}, None),
    ],
)
def test_output_limit(members: dict[str, Any], limit: int | None) -> None:
    assert parse({**HELLO, **members}).request.max_output_tokens == limit


@pytest.mark.parametrize(
    ("value", "streams"), [(True, True), ("true", True), (False, False), (None, False), ({}, False)]
)
def test_stream_flag(value: Any, streams: bool) -> None:
    assert parse({**HELLO, "stream": value}).request.stream is streams


def test_cache_salt_is_text() -> None:
    assert parse({**HELLO, "cache_salt": 'a"\u00e9'}).request.cache_salt == 'a"\u00e9'
    assert parse({**HELLO, "cache_salt": 5}).request.cache_salt == ""


# -- identity of completions ---------------------------------------------------------------------------


def test_each_prompt_has_its_own_identity() -> None:
    assert prompts("héllo") == ("héllo".encode(),)
    assert prompts(["a" * 512, "b"]) == (b"a" * 512, b"b")


def test_the_end_of_a_long_list_is_one_prompt() -> None:
    texts = [f"text {number}" for number in range(1030)]
    told = prompts(texts)
    assert told[:1024] == tuple(text.encode() for text in texts[:1024])
    assert told[1024:] == (b'"text 1024","text 1025","text 1026","text 1027","text 1028","text 1029"',)
    assert prompts(texts[:1024]) == told[:1024]
    assert prompts([]) == ()
    assert prompts([""]) == (b"",)
    assert prompts([[1, 2], [], [3]]) == (struct.pack("<2I", 1, 2), b"", struct.pack("<I", 3))
    assert prompts(None, prompt_embeds="AAAA") == ()


def test_tokens_are_counted_over_all_prompts() -> None:
    assert parse({"prompt": ["12345", "1"]}, COMPLETIONS).request.prompt_tokens == 3
    assert parse({"prompt": [[7, 7, 7], [7]]}, COMPLETIONS).request.prompt_tokens == 4
    assert parse({"prompt": []}, COMPLETIONS).request.prompt_tokens == 0


@pytest.mark.parametrize(
    "text", ["[1,2,4294967295]", "[ 1 , 2\n,\t4294967295 ]", "[1.0,2,4294967295]", "[1,2e0,4294967295]"]
)
def test_token_ids_are_exact(text: str) -> None:
    assert parse(f'{{"prompt":{text}}}'.encode(), COMPLETIONS).request.prompts == (
        struct.pack("<3I", 1, 2, 2**32 - 1),
    )


@pytest.mark.parametrize(
    "text",
    [
        "[4294967296]",
        "[-1]",
        "[1.5]",
        "[1,true]",
        "[1,null]",
        '[1,"a"]',
        "[1,[2]]",
        "[1e400]",
        "[" + "9" * 400 + "]",
    ]
    + ["[[1],[-1]]", "[[1],[[2]]]"],
)
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="token ids") as refused:
        parse(f'{{"prompt":{text}}}'.encode(), COMPLETIONS)
    assert refused.value.param == "prompt"


# -- identity of chats ---------------------------------------------------------------------------------


def test_spelling_of_text_does_not_matter() -> None:
    plain = parse('{"model":"m","messages":[{"role":"user","content":"é\u20ac"}]}'.encode())
    escaped = parse(b'{"model":"m", "messages":[{"content":"\\u00e9\\u20ac","role":"us\\u0065r"}]}')
    assert plain.request.prompts == escaped.request.prompts


def test_one_text_part_is_the_same_as_text() -> None:
    assert chat(user("hello")) == chat(user([{"type": "text", "text": "hello"}]))


def test_chats_that_differ_have_different_identities() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    chats = [
        chat(user("ab")),
        chat(user("a"), user("b")),
        chat(user("a"), {"role": "assistant", "content": "b"}),
        chat({"role": "usera", "content": "b"}),
        chat({"role": "user"}, user("ab")),
        chat(user(["a", "b"])),
        chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        chat(user([{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}])),
        chat(user([image, {"type": "text", "text": "ab"}])),
        chat(user([{"type": "text", "text": "ab"}, image])),
        chat(user([{"type": "thing", "thing": "ab"}])),
        chat(user([{"type": "thing", "thing": "ba"}])),
        chat(user("ab"), tools=[tool]),
        chat(user("ab"), documents=[tool]),
        chat(user("ab"), chat_template="{{x}}"),
        chat(user("ab"), chat_template_kwargs={"enable_thinking": False}),
        chat({"role": "user", "content": "ab", "tool_calls": [call]}),
        chat({"role": "user", "content": None, "tool_calls": [call]}),
        chat(user(5)),
        chat(user({"a": 5})),
    ]
    assert len(set(chats)) == len(chats)


def test_what_changes_only_the_end_of_the_prompt_does_not_enter() -> None:
    assert chat(user("a")) == chat(user("a"), add_generation_prompt=False, continue_final_message=True)
    assert chat(user("a")) == chat(user("a"), tools=[], documents=None, chat_template_kwargs={})


def test_tool_results_are_part_of_the_prompt() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "ls"}}]}
    before = chat(user("list"), call)
    after = chat(user("list"), call, {"role": "tool", "tool_call_id": "c1", "content": "file list"})
    assert after.startswith(before)
    assert b"file list" in after


MEDIA = [
    ({"type": "image_url", "image_url": {"url": "%s"}}, IMAGE_TOKENS),
    ({"type": "image_url", "image_url": {"url": "%s", "detail": "low"}}, IMAGE_TOKENS),
    ({"type": "image_url", "image_url": "%s"}, IMAGE_TOKENS),
    ({"type": "video_url", "video_url": {"url": "%s"}}, VIDEO_TOKENS),
    ({"type": "input_audio", "input_audio": {"data": "%s", "format": "wav"}}, 1000),
    ({"type": "audio_url", "audio_url": {"url": "%s"}}, 1000),
]


def medium(template: dict[str, Any], content: str) -> dict[str, Any]:
    part: dict[str, Any] = json.loads(json.dumps(template).replace("%s", content))
    return part


@pytest.mark.parametrize(("template", "tokens"), MEDIA)
@pytest.mark.parametrize("text", ["", "a", "ab", "abc"])
def test_a_medium_takes_its_tokens_at_its_place(template: dict[str, Any], tokens: int, text: str) -> None:
    part = medium(template, "x" * 4000)
    before = chat(user(text))
    identity = chat(user([{"type": "text", "text": text}, part, {"type": "text", "text": "after"}]))
    assert identity.startswith(before)
    placed = -(-(len(before) + 1) // 4) * 4
    run = identity[placed : placed + 4 * tokens]
    assert run == run[:4] * tokens
    assert identity[placed + 4 * tokens :].endswith(b"after")
    assert len(identity) - placed - 4 * tokens <= len(b"after") + 1


@pytest.mark.parametrize(("template", "_tokens"), MEDIA)
def test_equal_media_stick_and_others_spread(template: dict[str, Any], _tokens: int) -> None:
    def of(content: str) -> bytes:
        return chat(user([medium(template, content), {"type": "text", "text": "what is it?"}]))

    assert of("x" * 4000) == of("x" * 4000)
    assert len({of("x" * 3999 + letter) for letter in "abcdefgh"}) == 8
    assert of("x" * 4000)[:64] != of("y" * 4000)[:64]


def test_parts_without_content_are_tolerated() -> None:
    for part in (
        None,
        5,
        {},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 5}},
        {"text": 5},
    ):
        assert chat(user([part, {"type": "text", "text": "after"}])).endswith(b"after")


# -- compressed bodies ---------------------------------------------------------------------------------


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


LONG = {"model": "m", "messages": [user("hello " * 50_000)]}
PLAIN = json.dumps(LONG).encode()
COMPRESSED = {
    "gzip": gzip.compress(PLAIN, mtime=0),
    "GZIP": gzip.compress(PLAIN, mtime=0),
    "x-gzip": gzip.compress(PLAIN, mtime=0),
    "identity, gzip": gzip.compress(PLAIN, mtime=0),
    "gzip ": b"".join(
        gzip.compress(PLAIN[start : start + 5000], mtime=0) for start in range(0, len(PLAIN), 5000)
    ),
    " gzip": gzip.compress(PLAIN, mtime=0) + b"\0" * 100,
    "deflate": zlib.compress(PLAIN),
    "Deflate": raw_deflate(PLAIN),
}


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_compressed_bodies_are_read(encoding: str) -> None:
    body = COMPRESSED[encoding]
    parsed = parse(body, content_encoding=encoding)
    assert parsed.plain == PLAIN
    assert parsed.body is body
    assert parsed.request == parse(PLAIN).request
    rewritten = rewrite_model(parsed, "other")
    assert json.loads(rewritten.body) == {**LONG, "model": "other"}
    assert rewritten.remove_headers == ("content-encoding",)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip, br", "aws-chunked"])
def test_other_encodings_pass_unread(encoding: str) -> None:
    assert parse(b"anything", content_encoding=encoding).request.api is Api.PASSTHROUGH


def test_encodings_in_several_headers_add_up() -> None:
    headers = (("content-encoding", "gzip"), ("content-encoding", "gzip"))
    raw = RawRequest("id", "POST", CHAT, headers, gzip.compress(gzip.compress(PLAIN, mtime=0)))
    assert parse_request(raw, max_bytes=LIMIT).request.api is Api.PASSTHROUGH


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", PLAIN),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:-1]),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:5]),
        ("gzip", gzip.compress(PLAIN, mtime=0) + b"tail"),
        ("gzip", gzip.compress(PLAIN, mtime=0) + gzip.compress(PLAIN, mtime=0)[:-9]),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:-8] + b"\0" * 8),
        ("gzip", gzip.compress(b"", mtime=0) * 5000),
        ("deflate", PLAIN),
        ("deflate", zlib.compress(PLAIN)[:-1]),
        ("deflate", zlib.compress(PLAIN) + b"tail"),
    ],
)
def test_broken_streams_are_refused(encoding: str, body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body, content_encoding=encoding)
    assert refused.value.param == "content-encoding"


def test_empty_compressed_body_is_an_empty_body() -> None:
    with pytest.raises(BadRequest, match="empty"):
        parse(b"", content_encoding="gzip")


def test_a_bomb_is_refused_within_the_limit() -> None:
    bomb = gzip.compress(gzip.compress(b"\0" * (64 << 20), mtime=0), mtime=0)
    bombs = (
        gzip.decompress(bomb),
        zlib.compress(b"\0" * (64 << 20)),
        gzip.compress(b"\0" * 400_000, mtime=0) * 200,
    )
    for body, encoding in zip(bombs, ("gzip", "deflate", "gzip"), strict=True):
        tracemalloc.start()
        with pytest.raises(PayloadTooLarge):
            parse(body, content_encoding=encoding)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2.5 * LIMIT


def test_a_body_of_exactly_the_limit_is_read() -> None:
    assert parse(COMPRESSED["gzip"], limit=len(PLAIN), content_encoding="gzip").plain == PLAIN
    with pytest.raises(PayloadTooLarge):
        parse(COMPRESSED["gzip"], limit=len(PLAIN) - 1, content_encoding="gzip")
    with pytest.raises(PayloadTooLarge):
        parse(PLAIN, limit=len(PLAIN) - 1)
    with pytest.raises(PayloadTooLarge):
        parse(b"x" * 11, "/upload", limit=10)
