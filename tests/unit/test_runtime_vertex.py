"""Where calls of Vertex AI's gRPC API are read: as the JSON in them would be."""

import json

import msgspec
import pytest

from epp.payload.apis import PARSERS, ParserSet
from epp.payload.records import RawRequest
from epp.payload.request import parse_request, rewrite_model
from epp.runtime import decoder
from epp.runtime.decoder import CHILD_BODY_BYTES, is_large
from tests.data.vertex.google import asked, path_of

ALL = ParserSet(PARSERS)
PATH = path_of("ChatCompletions")


def call(document: object) -> RawRequest:
    return RawRequest("id", "POST", PATH, (), asked("ChatCompletions", document))


@pytest.mark.parametrize(
    ("count", "characters", "large"),
    [(1, 500_000, False), (1, CHILD_BODY_BYTES, True), (4000, 1, True), (10, 10, False)],
)
def test_many_small_values_are_read_elsewhere(count: int, characters: int, large: bool) -> None:
    message = {"role": "user", "content": "a" * characters}
    document = {"messages": [message] * count}
    assert is_large(call(document), ALL) is large
    http = RawRequest("id", "POST", "/v1/chat/completions", (), json.dumps(document).encode())
    assert is_large(http, ALL) is large


def test_what_another_process_has_read_can_be_renamed() -> None:
    raw = call({"model": "old", "messages": [{"role": "user", "content": "a"}]})
    here = parse_request(raw, max_bytes=1 << 20, parsers=ALL)
    sent = decoder._parse(raw, 1 << 20, ALL)
    assert sent.body == b""
    there = decoder._with_body(
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(sent)), raw.body
    )
    assert there == here
    assert rewrite_model(there, "new") == rewrite_model(here, "new")
