"""Requests of vLLM's gRPC API, against what protobuf's own reader makes of the same bytes."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from epp.errors import BadRequest
from epp.payload import grpc
from epp.payload.apis import ParserSet
from epp.payload.grpc import read_embed, read_generate
from epp.payload.media import MOST_MEDIA
from epp.payload.records import Api, InferenceRequest, Medium, RawRequest
from epp.payload.request import parse_request
from epp.wire import vllm_engine_pb2 as pb


def _declared() -> Any:
    """`TokenizedInput` as vLLM declares it."""
    proto = descriptor_pb2.FileDescriptorProto(name="declared.proto", package="declared", syntax="proto3")
    message = proto.message_type.add(name="TokenizedInput")
    field = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="original_text", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    message.field.add(name="input_ids", number=2, type=field.TYPE_UINT32, label=field.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("declared.TokenizedInput"))


TokenizedInput = _declared()


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(message).to_bytes(4) + message


def tokenized(ids: list[int], **fields: Any) -> bytes:
    """A Generate request with the ids as a client of vLLM's own stubs writes them."""
    inner = TokenizedInput(original_text="told for debugging", input_ids=ids).SerializeToString()
    request = pb.GenerateRequest(**fields)
    request.tokenized.MergeFromString(inner)
    return framed(request.SerializeToString())


def ids_of(request: InferenceRequest) -> list[int]:
    (identity,) = request.prompts
    return np.frombuffer(identity, "<u4").tolist()


def test_text() -> None:
    message = pb.GenerateRequest(text="grüße".encode(), stream=True)
    message.sampling_params.max_tokens = 40
    assert read_generate(framed(message.SerializeToString())) == InferenceRequest(
        api=Api.VLLM_GRPC_GENERATE,
        prompts=("grüße".encode(),),
        prompt_tokens=2,
        max_output_tokens=40,
        stream=True,
    )


def test_no_limit_and_a_limit_of_zero_are_two_things() -> None:
    message = pb.GenerateRequest(text=b"a")
    message.sampling_params.SetInParent()
    assert read_generate(framed(message.SerializeToString())).max_output_tokens is None
    message.sampling_params.max_tokens = 0
    assert read_generate(framed(message.SerializeToString())).max_output_tokens == 0


@pytest.mark.parametrize("largest", [1, 127, 128, 16_383, 151_936, 2**21, 2**28, 2**32 - 1])
def test_token_ids_are_those_that_protobuf_reads(largest: int) -> None:
    draw = random.Random(largest)
    for count in (0, 1, 2, 3, 100, 5_000):
        ids = [draw.randint(0, largest) for _ in range(count)]
        request = read_generate(tokenized(ids))
        assert ids_of(request) == ids
        assert request.prompt_tokens == count
        embed = pb.EmbedRequest()
        embed.tokenized.MergeFromString(TokenizedInput(input_ids=ids).SerializeToString())
        read = read_embed(framed(embed.SerializeToString()))
        assert (read.api, ids_of(read)) == (Api.VLLM_GRPC_EMBED, ids)


def test_odd_varints_are_those_that_protobuf_reads() -> None:
    """Longer than needed, beyond 32 bits, and in several runs: all of it legal."""
    draw = random.Random(5)
    for _ in range(300):
        runs = []
        for _ in range(draw.randint(1, 3)):
            run = b""
            for _ in range(draw.randint(0, 6)):
                length = draw.randint(1, 10)
                run += bytes(draw.randrange(128) | 0x80 for _ in range(length - 1))
                run += bytes([draw.randrange(2 if length == 10 else 128)])
            runs.append(run)
        packed = pb.TokenizedInput(input_ids=runs)
        wanted = list(TokenizedInput.FromString(packed.SerializeToString()).input_ids)
        got = read_generate(framed(pb.GenerateRequest(tokenized=packed).SerializeToString()))
        assert ids_of(got) == wanted


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\xff", b"\x80" * 10 + b"\x01", b"\x80" * 11])
def test_ids_that_are_no_varints_are_refused(packed: bytes) -> None:
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[packed]))
    with pytest.raises(BadRequest, match="`input_ids` are not packed varints") as refused:
        read_generate(framed(message.SerializeToString()))
    assert refused.value.param == "input_ids"


def media(hashes: list[bytes], places: list[tuple[int, int]], pixels: bytes = b"") -> pb.MultimodalInputs:
    return pb.MultimodalInputs(
        pixel_values=pb.TensorData(data=pixels),
        mm_placeholders=[pb.PlaceholderRange(offset=offset, length=length) for offset, length in places],
        mm_hashes=hashes,
    )


def test_placeholders_carry_the_digest_of_their_medium() -> None:
    ids = [1, 9, 9, 9, 2, 9, 9, 3]
    one, two = (xxhash.xxh3_64_intdigest(text) for text in (b"one", b"two"))
    request = read_generate(tokenized(ids, mm_inputs=media([b"one", b"two"], [(1, 3), (5, 2)])))
    low = [digest & 0xFFFFFFFF for digest in (one, two)]
    assert ids_of(request) == [1, *[low[0]] * 3, 2, *[low[1]] * 2, 3]
    assert request.prompt_tokens == len(ids)
    assert request.media == (Medium("image", one, 3), Medium("image", two, 2))


def test_media_without_hashes_are_told_apart_by_their_pixels() -> None:
    ids = [9, 9, 9]
    prompts = {
        read_generate(tokenized(ids, mm_inputs=media([], [(0, 3)], pixels))).prompts
        for pixels in (b"", b"red", b"green", b"green")
    }
    assert len(prompts) == 3


@pytest.mark.parametrize("places", [[(0, 2**32 - 1)], [(2**32 - 1, 1)], [(0, 4), (0, 4)], [(3, 9)], [(4, 0)]])
def test_places_that_cannot_be_harm_nothing(places: list[tuple[int, int]]) -> None:
    request = read_generate(tokenized([1, 2, 3, 4], mm_inputs=media([b"a"], places)))
    assert len(ids_of(request)) == request.prompt_tokens == 4


def test_many_overlapping_places_take_no_time_of_their_own() -> None:
    """As many as would cover the prompt a thousand times over; what covers it once is looked at."""
    places = [(0, 1000)] * 1000
    request = read_generate(tokenized(list(range(1000)), mm_inputs=media([b"a"] * 1000, places)))
    assert len(request.media) == 1


@pytest.mark.parametrize("length", [0, 1])
def test_so_many_places_are_looked_at(length: int) -> None:
    """A place takes two bytes, and a body is read where all others wait."""
    count = 2 * MOST_MEDIA
    places = [(index, length) for index in range(count)]
    request = read_generate(tokenized([7] * count, mm_inputs=media([b"a"] * count, places)))
    assert len(request.media) == MOST_MEDIA
    assert ids_of(request)[MOST_MEDIA:] == [7] * MOST_MEDIA


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body has 0"),
        (b"\0\0\0\0", "the body has 4"),
        (framed(b"abc", flag=1), "compressed flag is 1"),
        (framed(b"abc", flag=255), "compressed flag is 255"),
        (framed(b"abc")[:-1], "announces 3 bytes, 2 came"),
        (b"\0\xff\xff\xff\xff", "announces 4294967295 bytes, 0 came"),
        (framed(b"\xff\xff"), "not a vllm.grpc.engine"),
        (framed(b""), "must have"),
    ],
)
@pytest.mark.parametrize("read", [read_generate, read_embed])
def test_what_cannot_be_read_is_refused_with_its_reason(read: Any, body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        read(body)


def test_a_compressed_message_names_the_header_to_change() -> None:
    with pytest.raises(BadRequest, match="send it with grpc-encoding identity") as refused:
        read_generate(framed(b"abc", flag=1))
    assert refused.value.param == "grpc-encoding"


def test_what_follows_the_first_message_is_left_to_the_engine() -> None:
    first = framed(pb.GenerateRequest(text=b"first").SerializeToString())
    for behind in (b"\0", b"garbage", framed(pb.GenerateRequest(text=b"second").SerializeToString())):
        assert read_generate(first + behind) == read_generate(first)


def test_the_service_is_found_by_its_path_and_no_other_method_is_read() -> None:
    parsers = ParserSet(["vllmgrpc-parser"])
    body = framed(pb.GenerateRequest(text=b"hello").SerializeToString())

    def parsed(method: str) -> InferenceRequest:
        raw = RawRequest("r", "POST", f"/vllm.grpc.engine.VllmEngine/{method}", (), body)
        return parse_request(raw, max_bytes=1000, parsers=parsers).request

    assert parsed("Generate").prompts == (b"hello",)
    for method in ("GetModelInfo", "HealthCheck", "Abort"):
        assert parsed(method) == InferenceRequest(api=Api.PASSTHROUGH)


# -- faults that these tests must see ------------------------------------------------------------------


def _shifts_by_eight(tokenized: Any, method: str) -> Any:
    return np.frombuffer(b"".join(tokenized.input_ids), np.uint8).astype("<u4")


def _first_run_only(tokenized: Any, method: str) -> Any:
    return TOKEN_IDS(pb.TokenizedInput(input_ids=tokenized.input_ids[:1]), method)


def _reversed(tokenized: Any, method: str) -> Any:
    return TOKEN_IDS(tokenized, method)[::-1].copy()


TOKEN_IDS = grpc._token_ids


@pytest.mark.parametrize("fault", [_shifts_by_eight, _first_run_only, _reversed])
def test_a_wrong_reading_of_ids_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "_token_ids", fault)
    with pytest.raises(AssertionError):
        test_odd_varints_are_those_that_protobuf_reads()


def test_the_record_says_nothing_of_models() -> None:
    request = read_generate(framed(pb.GenerateRequest(text=b"a").SerializeToString()))
    assert msgspec.structs.replace(request, prompts=(), prompt_tokens=0) == InferenceRequest(
        api=Api.VLLM_GRPC_GENERATE
    )
