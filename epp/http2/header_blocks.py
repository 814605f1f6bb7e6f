"""Header blocks put together from HEADERS and CONTINUATION frames (RFC 9113, 4.3, 6.2, 6.10)."""

from dataclasses import dataclass

from epp.http2.codes import END_HEADERS, END_STREAM, ErrorCode
from epp.http2.errors import ConnectionFault
from epp.http2.frames import unpadded, without_priority
from epp.http2.limits import Http2Limits


@dataclass(slots=True)
class HeaderBlock:
    """One block, whole.

    Attributes:
        depends_on: the stream that it names as its parent (RFC 9113, 5.3: read, and not followed).
        fragments: as they came, compressed.
    """

    stream_id: int
    ends_stream: bool
    depends_on: int | None
    fragments: bytes


class HeaderBlocks:
    """At most one block is open at a time, and no other frame may come before it is whole."""

    __slots__ = ("_block", "_frames", "_limits", "_since")

    def __init__(self, limits: Http2Limits) -> None:
        self._limits = limits
        self._block: HeaderBlock | None = None
        self._frames = 0
        self._since = 0.0

    @property
    def open(self) -> bool:
        return self._block is not None

    def begin(self, flags: int, stream_id: int, payload: bytes, now: float) -> HeaderBlock | None:
        """A HEADERS frame; the block where it is whole. Raises ConnectionFault."""
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        fragment, depends_on = without_priority(flags, unpadded(flags, payload))
        block = HeaderBlock(stream_id, bool(flags & END_STREAM), depends_on, fragment)
        self._frames = 1
        self._since = now
        return self._checked(block, flags)

    def go_on(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        """A CONTINUATION frame; the block where it is whole. Raises ConnectionFault."""
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block to continue")
        block.fragments += payload
        self._frames += 1
        return self._checked(block, flags)

    def check(self, now: float) -> None:
        """Raises ConnectionFault for a block that has been open for too long."""
        patience_s = self._limits.header_block_s
        if self._block is not None and now - self._since > patience_s:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"header block not complete within {patience_s:g} s"
            )

    def _checked(self, block: HeaderBlock, flags: int) -> HeaderBlock | None:
        limits = self._limits
        if len(block.fragments) > limits.header_block_bytes:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"header block above {limits.header_block_bytes} bytes"
            )
        if self._frames > limits.header_frames:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"header block in more than {limits.header_frames} frames"
            )
        if flags & END_HEADERS:
            self._block = None
            return block
        self._block = block
        return None
