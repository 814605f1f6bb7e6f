"""How many tokens pictures and videos count for: the parameters of `token-producer`'s estimate.

The formulas are the field's. Text counts four bytes a token, sound four bytes of its data or address.
Where a number of a parameter is 0 the default counts.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from epp import names
from epp.payload.records import Headers, find_header

Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Amount = Annotated[float, Meta(ge=0, le=1e9)]

_WIDTH, _HEIGHT = 640, 360
_PIXELS_PER_TOKEN = 1024
_DURATION_S = 10.0
_SAMPLE_FPS = 2.0
_SOURCE_FPS = 24.0
_RESOLUTION = re.compile(r"\s*([0-9]{1,9})\s*[xX]\s*([0-9]{1,9})\s*")


class _Parameters(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class Resolution(_Parameters, frozen=True):
    """Pixels of a picture or of a video's frame."""

    width: Count
    height: Count


class Dynamic(_Parameters, frozen=True):
    """Tokens follow the pixels: `factor` of them are one token."""

    factor: Count = _PIXELS_PER_TOKEN


class StaticImage(_Parameters, frozen=True):
    """Every picture counts the same."""

    static_token: Count = 0


class StaticFrame(_Parameters, frozen=True):
    """Every frame counts the same."""

    num_tokens_per_frame: Count = 0


class TokensPerFrame(_Parameters, frozen=True):
    """What one frame of a video counts."""

    mode: Literal["dynamic", "static"] = "dynamic"
    static: StaticFrame = StaticFrame()
    dynamic: Dynamic = Dynamic()


class Sampled(_Parameters, frozen=True):
    """Engines that look at so many frames a second, and at `temporal_patch_size` of them together."""

    sample_fps: Amount = field(default=_SAMPLE_FPS, name="sampleFPS")
    temporal_patch_size: Count = 0


class Strided(_Parameters, frozen=True):
    """Engines that look at every `frame_stride`-th frame of the source."""

    default_source_fps: Amount = field(default=_SOURCE_FPS, name="defaultSourceFPS")
    frame_stride: Count = 1


class Frames(_Parameters, frozen=True):
    """How many frames of a video an engine looks at. `max_frames` 0 = no limit."""

    mode: Literal["sampled", "strided"] = "sampled"
    min_frames: Count = 0
    max_frames: Count = 0
    sampled: Sampled = Sampled()
    strided: Strided = Strided()


class VideoHints(Struct, frozen=True):
    """What a client says of its videos; 0 = nothing."""

    fps: float = 0.0
    duration_s: float = 0.0
    width: int = 0
    height: int = 0


class ImageEstimate(_Parameters, frozen=True):
    """`estimate.image`."""

    mode: Literal["dynamic", "static"] = "dynamic"
    default_resolution: Resolution = Resolution(_WIDTH, _HEIGHT)
    static: StaticImage = StaticImage()
    dynamic: Dynamic = Dynamic()

    def tokens(self, size: tuple[int, int] | None) -> int:
        """Tokens of a picture of that width and height; None = unknown. At least one."""
        if self.mode == "static":
            return self.static.static_token or 1
        width, height = size or (
            self.default_resolution.width or _WIDTH,
            self.default_resolution.height or _HEIGHT,
        )
        return max(1, width * height // (self.dynamic.factor or _PIXELS_PER_TOKEN))


class VideoEstimate(_Parameters, frozen=True):
    """`estimate.video`. `max_video_tokens` 0 = no limit."""

    default_resolution: Resolution = Resolution(_WIDTH, _HEIGHT)
    default_duration: Amount = _DURATION_S
    tokens_per_frame: TokensPerFrame = TokensPerFrame()
    frames: Frames = Frames()
    max_video_tokens: Count = 0

    def tokens(self, hints: VideoHints) -> int:
        """Tokens of a video: its frames times what a frame counts. At least one."""
        tokens = self._frames(hints) * self._tokens_per_frame(hints)
        return max(1, min(tokens, self.max_video_tokens or tokens))

    def _frames(self, hints: VideoHints) -> int:
        duration_s = hints.duration_s or self.default_duration or _DURATION_S
        frames = self.frames
        if frames.mode == "strided":
            strided = frames.strided
            fps = hints.fps or strided.default_source_fps or _SOURCE_FPS
            return self._within(int(duration_s * fps) // (strided.frame_stride or 1))
        sampled = frames.sampled
        count = self._within(int(duration_s * (sampled.sample_fps or _SAMPLE_FPS)))
        return count // (sampled.temporal_patch_size or 1)

    def _within(self, count: int) -> int:
        count = max(count, self.frames.min_frames)
        return min(count, self.frames.max_frames or count)

    def _tokens_per_frame(self, hints: VideoHints) -> int:
        each = self.tokens_per_frame
        if each.mode == "static":
            return each.static.num_tokens_per_frame or 1
        width, height = self.default_resolution.width, self.default_resolution.height
        if hints.width and hints.height:
            width, height = hints.width, hints.height
        return max(1, (width or _WIDTH) * (height or _HEIGHT) // (each.dynamic.factor or _PIXELS_PER_TOKEN))


class Estimate(_Parameters, frozen=True):
    """`estimate`."""

    image: ImageEstimate = ImageEstimate()
    video: VideoEstimate = VideoEstimate()


def video_hints(headers: Headers) -> VideoHints:
    """What the `x-llm-d-video-*` headers say. A value that makes no sense says nothing."""
    fps, duration, resolution = (find_header(headers, name) for name in names.VIDEO_HINTS)
    pixels = _RESOLUTION.fullmatch(resolution) if resolution else None
    width, height = (int(pixels[1]), int(pixels[2])) if pixels else (0, 0)
    return VideoHints(_positive(fps), _positive(duration), width, height)


def _positive(text: str | None) -> float:
    try:
        return msgspec.convert(text, Amount, strict=False) if text else 0.0
    except msgspec.ValidationError:
        return 0.0
