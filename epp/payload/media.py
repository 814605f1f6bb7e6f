"""Pictures, videos and sounds of one request: their place in a prompt's identity, and what they count."""

import xxhash

from epp.payload.estimate import Estimate, video_hints
from epp.payload.pictures import Size, size_in_url, size_of
from epp.payload.records import Headers, MediaKind, Medium

MARK = b"\xf5"
AUDIO_BYTES_PER_TOKEN = 4

MOST_MEDIA = 1024
"""Media of a request that are told one by one; a few bytes are enough for each further one."""

MOST_TOKENS = 1 << 20
"""Tokens that pictures and videos of a request may take; what comes after them counts one each.

A few bytes of a body can name a picture of any size, or a video of any length.
"""

# Keep a picture and a video at the same address apart, whatever the estimate says of them.
_IMAGE_SEED, _VIDEO_SEED = 225, 4500


class Media:
    """Collects the media of one request as its prompts are written."""

    __slots__ = ("_estimate", "_found", "_headers", "_left", "_video_tokens")

    def __init__(self, headers: Headers, estimate: Estimate) -> None:
        """`headers`: the request's, which may tell of its videos."""
        self._found: list[Medium] = []
        self._headers = headers
        self._estimate = estimate
        self._left = MOST_TOKENS
        self._video_tokens = 0

    @property
    def found(self) -> tuple[Medium, ...]:
        """The first `MOST_MEDIA`, in order."""
        return tuple(self._found) if self._found else ()

    def add_image(self, identity: bytearray, url: bytes | memoryview) -> None:
        """A picture, by its address; in a data URL its size is seen."""
        self._add_image(identity, url, size_in_url(url))

    def add_image_data(self, identity: bytearray, data: bytes | memoryview) -> None:
        """A picture, by its base64."""
        self._add_image(identity, data, size_of(data))

    def _add_image(self, identity: bytearray, content: bytes | memoryview, size: Size | None) -> None:
        tokens = self._estimate.image.tokens(size)
        digest = xxhash.xxh3_64_intdigest(content, seed=_IMAGE_SEED)
        self._place(identity, Medium("image", digest, self._allowed(tokens)))

    def add_video(self, identity: bytearray, url: bytes | memoryview) -> None:
        """A video, by its address. What headers say of videos is said of each."""
        if not self._video_tokens:
            self._video_tokens = self._estimate.video.tokens(video_hints(self._headers))
        digest = xxhash.xxh3_64_intdigest(url, seed=_VIDEO_SEED)
        self._place(identity, Medium("video", digest, self._allowed(self._video_tokens)))

    def add_audio(self, identity: bytearray, content: bytes | memoryview) -> None:
        """A sound, by its data or address."""
        tokens = max(1, len(content) // AUDIO_BYTES_PER_TOKEN)
        digest = xxhash.xxh3_64_intdigest(content, seed=tokens)
        self._place(identity, Medium("audio", digest, tokens))

    def add_hashed(self, kind: MediaKind | None, content_hash: bytes, tokens: int) -> bytes:
        """A medium that an engine has processed already; returns the token that stands for it.

        One of an unknown kind is not collected.
        """
        digest = xxhash.xxh3_64_intdigest(content_hash)
        if kind is not None:
            self._note(Medium(kind, digest, tokens))
        return _token(digest)

    def _note(self, medium: Medium) -> None:
        if len(self._found) < MOST_MEDIA:
            self._found.append(medium)

    def _allowed(self, tokens: int) -> int:
        allowed = max(1, min(tokens, self._left))
        self._left -= allowed
        return allowed

    def _place(self, identity: bytearray, medium: Medium) -> None:
        """Its tokens all carry its digest, and stand at a whole token's place."""
        identity += MARK * (4 - len(identity) % 4)
        identity += _token(medium.digest) * medium.tokens
        self._note(medium)


def _token(digest: int) -> bytes:
    return (digest & 0xFFFFFFFF).to_bytes(4, "little")
