"""Header blocks of requests as a proxy sends them: repeated, and with new tracing fields each time."""

import random
import uuid
from collections.abc import Callable

import hpack
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman as library_huffman

from benchmarks.rows.timing import Effort, Result, cpu_us
from epp.http2.fields import Field, FieldDecoder
from epp.http2.heads import HeadReader
from epp.http2.huffman import decode_huffman
from epp.http2.limits import Http2Limits

LIST_BYTES = Http2Limits().header_list_bytes
TRACEPARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STEADY: list[Field] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    (b":authority", b"picker"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-envoy-internal", b"true"),
    (b"x-forwarded-for", b"127.0.0.1"),
]
HOSTILE = (
    b"\x41\x00"  # an entry for the table whose name is indexed and whose value is empty: dear for its size
)

Read = Callable[[bytes], object]


def reading(effort: Effort) -> list[Result]:
    """From block to validated head; beside it the `hpack` library, which only decodes."""
    encoder = hpack.Encoder()
    first, again = encoder.encode(STEADY), encoder.encode(STEADY)
    return [
        Result("head of a request, all fields known", "us", 1.0, _repeated(_reader, first, again, effort)),
        Result("the same block in the hpack library", "us", None, _repeated(_library, first, again, effort)),
        Result("head of a request with new tracing fields", "us", 15.0, _traced(_reader, effort)),
        Result("the same blocks in the hpack library", "us", None, _traced(_library, effort)),
        *_huffman(effort),
        _hostile(effort),
    ]


def _reader() -> Read:
    return HeadReader(FieldDecoder(LIST_BYTES)).request


def _library() -> Read:
    decoder = hpack.Decoder(max_header_list_size=LIST_BYTES)
    return lambda block: decoder.decode(block, raw=True)


def _repeated(make: Callable[[], Read], first: bytes, again: bytes, effort: Effort) -> tuple[float, ...]:
    read = make()
    read(first)
    return cpu_us(lambda: read(again), effort, inner=effort.inner * 10)


def _traced(make: Callable[[], Read], effort: Effort) -> tuple[float, ...]:
    """Every block moves the table, so all of a sample's are read in order, by a reader that has its own."""
    draw = random.Random(4)
    encoder, read = hpack.Encoder(), make()
    blocks: list[bytes] = []

    def renew() -> None:
        blocks.clear()
        for _ in range(effort.inner):
            trace = f"00-{draw.getrandbits(128):032x}-{draw.getrandbits(64):016x}-01".encode()
            request = str(uuid.UUID(int=draw.getrandbits(128), version=4)).encode()
            blocks.append(encoder.encode([*STEADY, (b"traceparent", trace), (b"x-request-id", request)]))

    def run() -> None:
        for block in blocks:
            read(block)

    renew()
    return cpu_us(run, effort, per=effort.inner, inner=1, between=renew)


def _huffman(effort: Effort) -> list[Result]:
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(TRACEPARENT)
    return [
        Result("Huffman-coded traceparent", "us", None, cpu_us(lambda: decode_huffman(coded), effort)),
        Result("the same in the hpack library", "us", None, cpu_us(lambda: library_huffman(coded), effort)),
    ]


def _hostile(effort: Effort) -> Result:
    """The dearest block of the greatest length."""
    block = HOSTILE * (Http2Limits().header_block_bytes // len(HOSTILE))
    decoder = FieldDecoder(1 << 40)
    samples = cpu_us(lambda: decoder.decode(block), effort, inner=max(1, effort.inner // 100))
    return Result("hostile header block of 32 KiB", "ms", None, tuple(sample / 1000 for sample in samples))
