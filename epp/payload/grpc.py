"""Requests of vLLM's gRPC API (`vllm.grpc.engine.VllmEngine`): a framed protobuf message in the body.

They name no model. Other methods of the service are not read.
"""

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError

from epp.errors import BadRequest
from epp.payload.framed import request_message
from epp.payload.media import MOST_MEDIA
from epp.payload.records import Api, InferenceRequest, Medium
from epp.wire.vllm_engine_pb2 import EmbedRequest, GenerateRequest, MultimodalInputs, TokenizedInput

_MORE = 0x80
_LONGEST_VARINT = 10


def read_generate(body: bytes) -> InferenceRequest:
    """A `Generate` request: `text`, or token ids with the media that stand among them.

    Raises:
        BadRequest: the body is no frame of that message, is compressed, or has neither input.
    """
    try:
        asked = GenerateRequest.FromString(request_message(body, "Generate"))
    except DecodeError:
        raise BadRequest("invalid Generate request: not a vllm.grpc.engine.GenerateRequest") from None
    media: tuple[Medium, ...] = ()
    match asked.WhichOneof("input"):
        case "text":
            identity, tokens = asked.text, -(-len(asked.text) // 4)
        case "tokenized":
            ids = _token_ids(asked.tokenized, "Generate")
            if asked.HasField("mm_inputs"):
                media = _mark_media(ids, asked.mm_inputs)
            identity, tokens = ids.tobytes(), len(ids)
        case _:
            raise BadRequest("invalid Generate request: must have `text` or `tokenized` input", "input")
    limit = asked.sampling_params.max_tokens if asked.sampling_params.HasField("max_tokens") else None
    return InferenceRequest(
        api=Api.VLLM_GRPC_GENERATE,
        prompts=(identity,),
        prompt_tokens=tokens,
        max_output_tokens=limit,
        stream=asked.stream,
        media=media,
    )


def read_embed(body: bytes) -> InferenceRequest:
    """An `Embed` request: token ids.

    Raises:
        BadRequest: the body is no frame of that message, is compressed, or has no `tokenized` input.
    """
    try:
        asked = EmbedRequest.FromString(request_message(body, "Embed"))
    except DecodeError:
        raise BadRequest("invalid Embed request: not a vllm.grpc.engine.EmbedRequest") from None
    if not asked.HasField("tokenized"):
        raise BadRequest("invalid Embed request: must have `tokenized` input", "tokenized")
    ids = _token_ids(asked.tokenized, "Embed")
    return InferenceRequest(api=Api.VLLM_GRPC_EMBED, prompts=(ids.tobytes(),), prompt_tokens=len(ids))


def _token_ids(tokenized: TokenizedInput, method: str) -> npt.NDArray[np.uint32]:
    """The ids of all packed runs; an array of its own. Cut to 32 bits, as every protobuf reader does."""
    packed = np.frombuffer(b"".join(tokenized.input_ids), np.uint8)
    if not len(packed):
        return np.empty(0, "<u4")
    continued = packed >= _MORE
    at = np.flatnonzero(~continued)
    follows = np.concatenate(([False], continued[:-1]))
    bits = (packed & ~np.uint8(_MORE)).astype("<u4")
    # From each last byte towards the first, a byte of every number at a time: those in front weigh less.
    ids, longer = bits[at], follows[at]
    for _ in range(_LONGEST_VARINT - 1):
        if not longer.any():
            break
        at = at - 1
        ids = np.where(longer, ids << np.uint32(7) | bits[at], ids)
        longer &= follows[at]
    if longer.any() or continued[-1]:
        raise BadRequest(f"invalid {method} request: `input_ids` are not packed varints", "input_ids")
    return ids


def _mark_media(ids: npt.NDArray[np.uint32], inputs: MultimodalInputs) -> tuple[Medium, ...]:
    """Let the placeholder tokens of a medium carry its digest, so that two pictures are two prompts.

    The digest is of the engine's own hash of the medium where the client sends one, else of all pixels. The
    first `MOST_MEDIA` are looked at.
    """
    found = []
    pixels: int | None = None
    room = len(ids)
    for index, place in enumerate(inputs.mm_placeholders[:MOST_MEDIA]):
        room -= place.length
        if room < 0:  # the places overlap: no engine makes sense of that
            break
        if index < len(inputs.mm_hashes):
            digest = xxhash.xxh3_64_intdigest(inputs.mm_hashes[index])
        else:
            pixels = xxhash.xxh3_64_intdigest(inputs.pixel_values.data) if pixels is None else pixels
            digest = pixels
        ids[place.offset : place.offset + place.length] = digest & 0xFFFFFFFF
        found.append(Medium("image", digest, place.length))
    return tuple(found)
