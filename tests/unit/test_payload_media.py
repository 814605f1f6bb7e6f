"""What pictures, videos and sounds count for: size from the data, parameters, hints, and a limit."""

import base64
import json
import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest

from epp.payload.apis import DEFAULT_PARSER_TYPES, ParserSet
from epp.payload.estimate import Estimate, VideoHints, video_hints
from epp.payload.media import MOST_MEDIA, MOST_TOKENS
from epp.payload.pictures import size_in_url, size_of
from epp.payload.records import InferenceRequest, Medium, RawRequest
from epp.payload.request import parse_request

CHAT = "/v1/chat/completions"
NO_HINTS = VideoHints()


def png(width: int, height: int) -> bytes:
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"rest"
    )


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<2H", width, height) + b"\xf7\x00\x00rest"


def jpeg(width: int, height: int, *before: int, marker: int = 0xC0) -> bytes:
    """Segments of so many bytes in front of the one that holds the size."""
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", size + 2) + b"x" * size for size in before)
    frame = struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3) + b"x" * 9
    return b"\xff\xd8" + segments + frame + b"\xff\xda"


def encoded(picture: bytes) -> bytes:
    return base64.b64encode(picture)


def read(*parts: dict[str, Any], estimate: Estimate = Estimate(), **headers: str) -> InferenceRequest:  # noqa: B008
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}]}).encode()
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    parsers = ParserSet(DEFAULT_PARSER_TYPES, estimate)
    raw = RawRequest("id", "POST", CHAT, named, body)
    return parse_request(raw, max_bytes=64 << 20, parsers=parsers).request


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


VIDEO = {"type": "video_url", "video_url": {"url": "http://x/v.mp4"}}


def estimate(**members: Any) -> Estimate:
    return msgspec.convert(members, Estimate)


# -- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (4000, 3000), (65535, 1)])
@pytest.mark.parametrize(
    "make",
    [
        png,
        gif,
        jpeg,
        lambda width, height: jpeg(width, height, 14),
        lambda width, height: jpeg(width, height, 65_533, 14, 0, 20_000),
        lambda width, height: jpeg(width, height, marker=0xC2),
        lambda width, height: jpeg(width, height).replace(b"\xff\xc0", b"\xff\xff\xff\xc0"),
        lambda width, height: jpeg(width, height).replace(b"\xff\xd8", b"\xff\xd8\xff\x01", 1),
    ],
)
def test_sizes_are_seen(make: Any, size: tuple[int, int]) -> None:
    picture = make(*size)
    assert size_of(encoded(picture)) == size
    assert size_of(memoryview(encoded(picture))) == size
    assert size_in_url(b"data:image/x;base64," + encoded(picture)) == size
    escaped = encoded(picture).replace(b"/", b"\\/")
    assert size_of(escaped) == size


@pytest.mark.parametrize(
    "picture",
    [
        b"",
        b"RIFF____WEBPVP8 ",
        b"GIF89a\x01",
        png(0, 5),
        gif(5, 0),
        png(3, 4)[:20],
        png(3, 4).replace(b"IHDR", b"IDAT"),
        jpeg(3, 4)[:8],
        jpeg(3, 4, marker=0xC4),
        jpeg(3, 4, *[0] * 100),
        jpeg(3, 4, 65_533, 65_533, 65_533),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    ],
)
def test_a_size_that_cannot_be_told_is_none(picture: bytes) -> None:
    assert size_of(encoded(picture)) is None


@pytest.mark.parametrize(
    "url", [b"http://x/a.png", b"data:image/png,abc", b"data:text/plain;base64,", b"", b"data:image/"]
)
def test_other_addresses_have_no_size(url: bytes) -> None:
    assert size_in_url(url + encoded(png(3, 4)) if url.startswith(b"data:text") else url) is None


def test_any_bytes_have_a_size_or_none() -> None:
    for picture in (png(64, 64), gif(64, 64), jpeg(64, 64, 14, 3)):
        whole = encoded(picture)
        for cut in range(len(whole)):
            size_of(whole[:cut])
            size_of(whole[:cut] + b"\\" + whole[cut:])
            size_of(whole[:cut] + b"\xff!" + whole[cut:])


def test_a_picture_is_not_decoded_as_a_whole() -> None:
    large = encoded(png(640, 480) + b"x" * (20 << 20))
    tracemalloc.start()
    assert size_of(large) == (640, 480)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# -- pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "size", "tokens"),
    [
        ({}, None, 225),
        ({}, (1024, 1024), 1024),
        ({}, (10, 10), 1),
        ({"dynamic": {"factor": 784}}, (280, 280), 100),
        ({"dynamic": {"factor": 0}}, (1024, 2), 2),
        ({"defaultResolution": {"width": 1024, "height": 100}}, None, 100),
        ({"defaultResolution": {"width": 0, "height": 0}}, None, 225),
        ({"defaultResolution": {"width": 1, "height": 1}}, (1024, 7), 7),
        ({"mode": "static", "static": {"staticToken": 256}}, (1024, 1024), 256),
        ({"mode": "static"}, (1024, 1024), 1),
    ],
)
def test_tokens_of_a_picture(parameters: Any, size: tuple[int, int] | None, tokens: int) -> None:
    assert estimate(image=parameters).image.tokens(size) == tokens


def test_the_size_of_a_picture_decides_its_tokens() -> None:
    url = "data:image/png;base64," + encoded(png(320, 320)).decode()
    asked = read(image(url), image("http://x/a.png"))
    assert [medium.tokens for medium in asked.media] == [100, 225]
    assert len({medium.digest for medium in asked.media}) == 2
    assert 325 <= asked.prompt_tokens < 335
    static = estimate(image={"mode": "static", "static": {"staticToken": 9}})
    assert [medium.tokens for medium in read(image(url), estimate=static).media] == [9]


# -- videos --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "hints", "tokens"),
    [
        ({}, NO_HINTS, 4500),
        ({}, VideoHints(duration_s=2.5), 5 * 225),
        ({}, VideoHints(width=1024, height=10), 20 * 10),
        ({}, VideoHints(width=1024), 4500),
        ({}, VideoHints(fps=60), 4500),
        ({"defaultDuration": 3}, NO_HINTS, 6 * 225),
        ({"defaultDuration": 3}, VideoHints(duration_s=1), 2 * 225),
        ({"defaultResolution": {"width": 1024, "height": 2}}, NO_HINTS, 40),
        ({"maxVideoTokens": 100}, NO_HINTS, 100),
        ({"frames": {"sampled": {"sampleFPS": 1}}}, NO_HINTS, 10 * 225),
        ({"frames": {"sampled": {"sampleFPS": 0}}}, NO_HINTS, 4500),
        ({"frames": {"sampled": {"temporalPatchSize": 2}}}, NO_HINTS, 10 * 225),
        ({"frames": {"sampled": {"temporalPatchSize": 1}}}, NO_HINTS, 4500),
        ({"frames": {"minFrames": 30}}, NO_HINTS, 30 * 225),
        ({"frames": {"maxFrames": 8, "sampled": {"temporalPatchSize": 2}}}, NO_HINTS, 4 * 225),
        ({"frames": {"mode": "strided"}}, NO_HINTS, 240 * 225),
        ({"frames": {"mode": "strided", "strided": {"frameStride": 24}}}, NO_HINTS, 10 * 225),
        ({"frames": {"mode": "strided", "strided": {"frameStride": 0}}}, NO_HINTS, 240 * 225),
        ({"frames": {"mode": "strided", "strided": {"defaultSourceFPS": 30}}}, NO_HINTS, 300 * 225),
        ({"frames": {"mode": "strided", "strided": {"defaultSourceFPS": 30}}}, VideoHints(fps=1), 10 * 225),
        ({"frames": {"mode": "strided", "maxFrames": 32}}, NO_HINTS, 32 * 225),
        ({"tokensPerFrame": {"mode": "static", "static": {"numTokensPerFrame": 66}}}, NO_HINTS, 20 * 66),
        ({"tokensPerFrame": {"mode": "static"}}, NO_HINTS, 20),
        ({"tokensPerFrame": {"dynamic": {"factor": 2304}}}, NO_HINTS, 20 * 100),
        ({}, VideoHints(duration_s=0.1), 1),
    ],
)
def test_tokens_of_a_video(parameters: Any, hints: VideoHints, tokens: int) -> None:
    assert estimate(video=parameters).video.tokens(hints) == tokens


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, NO_HINTS),
        ({"x-llm-d-video-fps": "30"}, VideoHints(fps=30)),
        ({"x-llm-d-video-duration-seconds": "12.5"}, VideoHints(duration_s=12.5)),
        ({"x-llm-d-video-resolution": "1280x720"}, VideoHints(width=1280, height=720)),
        ({"x-llm-d-video-resolution": " 1280 X 720 "}, VideoHints(width=1280, height=720)),
        *(
            ({name: value}, NO_HINTS)
            for name in ("x-llm-d-video-fps", "x-llm-d-video-duration-seconds")
            for value in ("", "x", "-1", "nan", "inf", "1e300", "1_0")
        ),
        *(
            ({"x-llm-d-video-resolution": value}, NO_HINTS)
            for value in ("", "1280", "x720", "1280x", "-1x5", "1.5x2", "9999999999x1")
        ),
    ],
)
def test_hints(headers: dict[str, str], hints: VideoHints) -> None:
    assert video_hints(tuple(headers.items())) == hints


def test_hints_are_for_every_video_and_change_no_digest() -> None:
    plain = read(VIDEO, VIDEO)
    hinted = read(VIDEO, VIDEO, x_llm_d_video_duration_seconds="1", x_llm_d_video_resolution="1024x10")
    assert [medium.tokens for medium in plain.media] == [4500, 4500]
    assert [medium.tokens for medium in hinted.media] == [20, 20]
    assert {medium.digest for medium in plain.media} == {medium.digest for medium in hinted.media}
    assert read(image("http://x/v.mp4")).media[0].digest != plain.media[0].digest


# -- what is unreasonable ------------------------------------------------------------------------------


def test_a_picture_that_claims_to_be_huge_costs_little() -> None:
    huge = "data:image/png;base64," + encoded(png(2**32 - 1, 2**32 - 1)).decode()
    asked = read(image(huge), image("http://x/a.png"), VIDEO)
    assert [medium.tokens for medium in asked.media] == [MOST_TOKENS, 1, 1]
    long = read(VIDEO, x_llm_d_video_duration_seconds="1000000000", x_llm_d_video_resolution="999999999x9999")
    assert [medium.tokens for medium in long.media] == [MOST_TOKENS]


def test_many_media_cost_no_more_than_a_body_may() -> None:
    videos = [{"type": "video_url", "video_url": {"url": f"v{number}"}} for number in range(5000)]
    asked, other = read(*videos), read(*videos[:-1], image("http://x/a.png"))
    assert asked.prompt_tokens <= MOST_TOKENS + 3 * 5000
    assert asked.prompts != other.prompts
    assert asked.media == other.media
    assert len({medium.digest for medium in asked.media}) == len(asked.media) == MOST_MEDIA


def test_a_request_without_media_has_none() -> None:
    assert read({"type": "text", "text": "a"}).media == ()
    assert Medium("image", 1, 2) == Medium("image", 1, 2)


@pytest.mark.parametrize(
    "members",
    [
        {"image": {"mode": "other"}},
        {"image": {"dynamic": {"factor": -1}}},
        {"image": {"width": 5}},
        {"video": {"frames": {"mode": "static"}}},
        {"video": {"defaultDuration": -1}},
        {"video": {"frames": {"sampled": {"sampleFps": 1}}}},
    ],
)
def test_wrong_parameters_are_refused(members: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(members, Estimate)
