"""Requests of engines' own APIs, in token ids: vLLM's `/inference/v1/generate`, SGLang's `/generate`."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from epp.errors import BadRequest
from epp.payload.body import ABSENT, Body, BodyReader, Span, count_of, is_given, is_true, text_bytes, text_of
from epp.payload.identity import token_ids
from epp.payload.media import Media
from epp.payload.records import Api, InferenceRequest, MediaKind

UNPARSABLE = "invalid generate request"
_NO_TOKEN_IDS = "invalid generate request: must have non-empty token_ids field"
_KINDS: Final[dict[str, MediaKind]] = {"image": "image", "video": "video", "audio": "audio"}


class _VllmGenerate(Body):
    token_ids: Raw = ABSENT
    features: Raw = ABSENT
    sampling_params: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT


class _SglangGenerate(Body):
    input_ids: Raw = ABSENT
    sampling_params: Raw = ABSENT
    extra_key: Raw = ABSENT
    stream: Raw = ABSENT


class _Sampling(msgspec.Struct):
    max_tokens: Raw = ABSENT
    max_new_tokens: Raw = ABSENT


class _Place(msgspec.Struct):
    offset: int
    length: int


_NOWHERE: Final = _Place(0, 0)


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[Raw]] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


_vllm = BodyReader(_VllmGenerate, UNPARSABLE)
_sglang = BodyReader(_SglangGenerate, UNPARSABLE)
_sampling = msgspec.json.Decoder(_Sampling)
_features = msgspec.json.Decoder(_Features)


def read_vllm(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A prompt in token ids, with the media that were processed for it."""
    read = _vllm.read(plain)
    asked = read.body
    model, span = _vllm.model(read)
    identity, tokens = _prompt_of(asked, media)
    return InferenceRequest(
        api=api,
        model=model,
        target_model=model,
        prompts=(identity,),
        prompt_tokens=tokens,
        max_output_tokens=count_of(_sampling_of(asked.sampling_params).max_tokens),
        stream=is_true(asked.stream),
        cache_salt=text_of(asked.cache_salt),
        media=media.found,
    ), span


def rendered_prompt(plain: bytes, media: Media) -> tuple[bytes, int]:
    """Identity and tokens of the prompt in what an engine rendered: a body that `read_vllm` takes.

    Raises:
        BadRequest: it is none.
    """
    return _prompt_of(_vllm.read(plain).body, media)


def _prompt_of(asked: _VllmGenerate, media: Media) -> tuple[bytes, int]:
    raw = bytes(asked.token_ids)
    ids = token_ids(raw) if raw[:1] == b"[" else None
    if ids is None and is_given(asked.token_ids):
        raise BadRequest(
            "invalid generate request: token_ids must be an array of uint32 integers", "token_ids"
        )
    if ids is None or not len(ids):
        raise BadRequest(_NO_TOKEN_IDS, "token_ids")
    return _with_media(ids, asked.features, media), len(ids)


def read_sglang(api: Api, plain: bytes, media: Media) -> tuple[InferenceRequest, Span | None]:
    """A prompt in token ids. It names no model."""
    asked = _sglang.read(plain).body
    if not is_given(asked.input_ids):
        raise BadRequest("invalid generate request: input_ids must be provided", "input_ids")
    if is_given(asked.extra_key) and bytes(asked.extra_key)[:1] != b'"':
        raise BadRequest("unsupported generate request: extra_key must be a string", "extra_key")
    raw = bytes(asked.input_ids)
    ids = token_ids(raw) if raw[:1] == b"[" else None
    if ids is None:
        raise BadRequest(
            "invalid generate request: input_ids must be an array of uint32 integers", "input_ids"
        )
    if not len(ids):
        raise BadRequest("invalid generate request: input_ids cannot be empty", "input_ids")
    return InferenceRequest(
        api=api,
        prompts=(ids.tobytes(),),
        prompt_tokens=len(ids),
        max_output_tokens=count_of(_sampling_of(asked.sampling_params).max_new_tokens),
        stream=is_true(asked.stream),
        cache_salt=text_of(asked.extra_key),
    ), None


def _sampling_of(value: Raw) -> _Sampling:
    try:
        return _sampling.decode(value)
    except msgspec.DecodeError:
        return _Sampling()


def _with_media(ids: npt.NDArray[np.uint32], features: Raw, media: Media) -> bytes:
    """The identity, in which the placeholder tokens of a medium carry its digest.

    Placeholders are the same for every picture. A medium whose place is not told, or was taken by others,
    stands in front, so that prompts with other media do not look like this one.
    """
    if not is_given(features):
        return ids.tobytes()
    try:
        told = _features.decode(features)
    except msgspec.DecodeError:
        return media.add_hashed(None, bytes(features), 0) + ids.tobytes()
    in_front = bytearray()
    room = len(ids)
    for kind, content_hash, place in _hashed(told):
        start, end = max(0, place.offset), min(len(ids), place.offset + place.length)
        size = end - start
        if not 0 < size <= room:  # none, or they overlap: no engine makes sense of that
            size = 0
        token = media.add_hashed(kind, content_hash, size)
        if size:
            room -= size
            ids[start:end] = int.from_bytes(token, "little")
        else:
            in_front += token
    return bytes(in_front) + ids.tobytes()


def _hashed(told: _Features) -> Iterator[tuple[MediaKind | None, bytes, _Place]]:
    """Kind, hash and place of each medium; what has no place stands at an empty one."""
    for modality, hashes in (told.mm_hashes or {}).items():
        kind = _KINDS.get(modality)
        places = (told.mm_placeholders or {}).get(modality, [])
        for content_hash, place in zip(hashes, chain(places, repeat(_NOWHERE)), strict=False):
            yield kind, text_bytes(bytes(content_hash)), place
