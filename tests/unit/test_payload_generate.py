"""Requests in token ids, of vLLM and of SGLang."""

import json
import struct
from typing import Any

import pytest

from epp.errors import BadRequest
from epp.payload.apis import PARSERS, ParserSet
from epp.payload.media import MOST_MEDIA
from epp.payload.records import Api, InferenceRequest, RawRequest
from epp.payload.request import Parsed, parse_request, rewrite_model

VLLM, SGLANG = "/inference/v1/generate", "/generate"
ALL = ParserSet(PARSERS)


def parse(path: str, members: dict[str, Any] | bytes) -> Parsed:
    body = members if isinstance(members, bytes) else json.dumps(members).encode()
    return parse_request(RawRequest("id", "POST", path, (), body), max_bytes=1 << 20, parsers=ALL)


def read(path: str, members: dict[str, Any] | bytes) -> InferenceRequest:
    return parse(path, members).request


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (VLLM, "{}", "invalid generate request: must have non-empty token_ids field", "token_ids"),
        (
            VLLM,
            '{"token_ids":[]}',
            "invalid generate request: must have non-empty token_ids field",
            "token_ids",
        ),
        (
            VLLM,
            '{"token_ids":null}',
            "invalid generate request: must have non-empty token_ids field",
            "token_ids",
        ),
        (
            VLLM,
            '{"token_ids":[1,-1]}',
            "invalid generate request: token_ids must be an array of uint32 integers",
            "token_ids",
        ),
        (
            VLLM,
            '{"token_ids":"a"}',
            "invalid generate request: token_ids must be an array of uint32 integers",
            "token_ids",
        ),
        (SGLANG, "{}", "invalid generate request: input_ids must be provided", "input_ids"),
        (SGLANG, '{"text":"a"}', "invalid generate request: input_ids must be provided", "input_ids"),
        (SGLANG, '{"input_ids":null}', "invalid generate request: input_ids must be provided", "input_ids"),
        (SGLANG, '{"input_ids":[]}', "invalid generate request: input_ids cannot be empty", "input_ids"),
        *(
            (
                SGLANG,
                f'{{"input_ids":{value}}}',
                "invalid generate request: input_ids must be an array of uint32 integers",
                "input_ids",
            )
            for value in ("5", '"a"', "[[1]]", "[-1]", "[4294967296]", "[1.5]", '["a"]', "{}")
        ),
        (
            SGLANG,
            '{"input_ids":[1],"extra_key":["a"]}',
            "unsupported generate request: extra_key must be a string",
            "extra_key",
        ),
    ],
)
def test_refusals_to_the_letter(path: str, body: str, message: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, body.encode())
    assert (refused.value.message, refused.value.param) == (message, param)


@pytest.mark.parametrize("path", [VLLM, SGLANG])
@pytest.mark.parametrize("body", [b"", b"[]", b"x", b'{"token_ids":[1]'])
def test_a_broken_body_is_refused(path: str, body: bytes) -> None:
    with pytest.raises(BadRequest, match="^invalid generate request: "):
        read(path, body)


def test_vllm_members() -> None:
    asked = read(
        VLLM,
        {
            "model": "m",
            "token_ids": [1, 2, 2**32 - 1],
            "sampling_params": {"max_tokens": 9},
            "stream": True,
            "cache_salt": "s",
            "features": None,
        },
    )
    assert asked == InferenceRequest(
        Api.VLLM_GENERATE, "m", "m", (ids(1, 2, 2**32 - 1),), 3, 9, stream=True, cache_salt="s"
    )


def test_sglang_members() -> None:
    asked = read(
        SGLANG,
        {
            "model": "m",
            "input_ids": [1, 2],
            "sampling_params": {"max_new_tokens": 9, "max_tokens": 5},
            "stream": True,
            "extra_key": "s",
        },
    )
    assert asked == InferenceRequest(
        Api.SGLANG_GENERATE, "", "", (ids(1, 2),), 2, 9, stream=True, cache_salt="s"
    )
    assert read(SGLANG, {"input_ids": [1], "extra_key": None}).cache_salt == ""


@pytest.mark.parametrize("params", [None, 5, "a", [], [{"max_new_tokens": 5}], {}, {"max_new_tokens": None}])
def test_odd_sampling_parameters_are_the_engines_to_judge(params: Any) -> None:
    assert read(SGLANG, {"input_ids": [1], "sampling_params": params}).max_output_tokens is None
    assert read(VLLM, {"token_ids": [1], "sampling_params": params}).max_output_tokens is None


def test_sglangs_body_takes_no_model() -> None:
    parsed = parse(SGLANG, {"model": "m", "input_ids": [1]})
    assert rewrite_model(parsed, "other").body is parsed.body
    assert parsed.model_span is None


# -- media ---------------------------------------------------------------------------------------------

PAD = 151655


def with_features(hashes: Any, places: Any, count: int = 8) -> InferenceRequest:
    features = {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": {"image": ["AAAA"]}}
    return read(VLLM, {"token_ids": [1, *[PAD] * (count - 2), 2], "features": features})


def place(offset: int, length: int) -> dict[str, int]:
    return {"offset": offset, "length": length}


def test_placeholders_carry_the_digest_of_their_medium() -> None:
    asked = with_features({"image": ["h1", "h2"]}, {"image": [place(1, 2), place(4, 3)]})
    (prompt,) = asked.prompts
    assert [(medium.kind, medium.tokens) for medium in asked.media] == [("image", 2), ("image", 3)]
    first, second = (medium.digest & 0xFFFFFFFF for medium in asked.media)
    assert struct.unpack("<8I", prompt) == (1, first, first, PAD, second, second, second, 2)
    assert asked.prompt_tokens == 8


def test_equal_media_stick_and_others_spread() -> None:
    def of(content_hash: str) -> bytes:
        return with_features({"image": [content_hash]}, {"image": [place(1, 6)]}).prompts[0]

    assert of("h1") == of("h1") != of("h2")
    assert of("h1")[:4] == of("h2")[:4]


@pytest.mark.parametrize(
    ("hashes", "places"),
    [
        ({"image": ["h1"]}, None),
        ({"image": ["h1"]}, {}),
        ({"image": ["h1"]}, {"image": []}),
        ({"image": ["h1"]}, {"image": [place(8, 2)]}),
        ({"image": ["h1"]}, {"image": [place(2, -5)]}),
        ({"other": ["h1"]}, None),
        ("odd", None),
        ({"image": "odd"}, None),
        ({"image": ["h1"]}, {"image": [{"offset": "a"}]}),
    ],
)
def test_a_medium_without_a_place_is_told_apart_too(hashes: Any, places: Any) -> None:
    plain = read(VLLM, {"token_ids": [1, *[PAD] * 6, 2]}).prompts[0]
    (prompt,) = with_features(hashes, places).prompts
    assert prompt[4:] == plain
    assert prompt[:4] != plain[:4]


@pytest.mark.parametrize(("offset", "length"), [(-3, 5), (6, 100), (0, 10**15), (-(10**15), 2 * 10**15)])
def test_a_place_beyond_the_prompt_is_cut(offset: int, length: int) -> None:
    asked = with_features({"video": ["h"]}, {"video": [place(offset, length)]})
    assert len(asked.prompts[0]) == 32
    covered = range(max(0, offset), min(8, offset + length))
    assert [(medium.kind, medium.tokens) for medium in asked.media] == [("video", len(covered))]


def test_what_overlaps_more_than_the_prompt_stands_in_front() -> None:
    """As many places as would cover the prompt a thousand times over."""
    hashes = [str(number) for number in range(1000)]
    asked = with_features({"image": hashes, "video": ["v"]}, {"image": [place(0, 8)] * 1000}, 8)
    assert sum(medium.tokens for medium in asked.media) == asked.prompt_tokens == 8
    first, *rest = (medium.digest & 0xFFFFFFFF for medium in asked.media)
    assert struct.unpack("<1008I", asked.prompts[0]) == (*rest, *[first] * 8)


def test_so_many_media_without_a_place_are_told_and_all_count() -> None:
    def of(last: str) -> InferenceRequest:
        return with_features({"image": [*["h"] * 50_000, last]}, None)

    one, other = of("one"), of("other")
    assert len(one.media) == len(other.media) == MOST_MEDIA
    assert len(one.prompts[0]) == 4 * (50_001 + 8)
    assert one.prompts != other.prompts


def test_a_kind_that_is_not_known_is_marked_and_not_collected() -> None:
    asked = with_features({"smell": ["h"]}, {"smell": [place(1, 6)]})
    assert asked.media == ()
    assert struct.unpack("<8I", asked.prompts[0])[1:7] != (PAD,) * 6
