"""What is fuzzed: functions of bytes that return, or raise where the product is wrong."""

import zlib
from collections.abc import Callable

from epp.http2.codes import Status
from epp.http2.errors import CallFault
from epp.http2.messages import MessageReader, MessageTooLarge
from fuzz.exchange import messages as exchange
from fuzz.frames import frames, raw
from fuzz.headers import headers

LIMIT_BYTES = 2000


def grpc_messages(data: bytes, make: Callable[[int, bool], MessageReader] = MessageReader) -> None:
    """DATA bytes. The first byte says in pieces of which size they come (0: whole), and what is announced."""
    if not data:
        return
    gzip, size = bool(data[0] & 1), data[0] >> 1
    wire = data[1:]
    reader = make(LIMIT_BYTES, gzip)
    got: list[bytes] = []
    fault: Exception | None = None
    size = size or len(wire) + 1
    try:
        for at in range(0, len(wire), size):
            for message in reader.feed(wire[at : at + size]):
                got.append(message)  # noqa: PERF402 - what came before a fault is looked at
            assert reader.held <= LIMIT_BYTES
    except (CallFault, MessageTooLarge) as caught:
        fault = caught
    expected, left, faults = _expected(wire, gzip)
    assert got == expected
    assert (fault is None) == (not faults)
    assert not isinstance(fault, CallFault) or fault.status is Status.INTERNAL
    assert fault is None or type(fault) in faults
    assert fault is not None or reader.complete == (left == 0)


def _expected(wire: bytes, gzip: bool) -> tuple[list[bytes], int, tuple[type[Exception], ...]]:
    """The messages, how many bytes are left, and which exceptions are right."""
    found: list[bytes] = []
    at = 0
    while len(wire) - at >= 5:
        flag, size = wire[at], int.from_bytes(wire[at + 1 : at + 5], "big")
        if flag > gzip:
            return found, 0, (CallFault,)
        if size > LIMIT_BYTES:
            return found, 0, (MessageTooLarge,)
        body = wire[at + 5 : at + 5 + size]
        if len(body) < size:
            break
        if flag:
            inflating = zlib.decompressobj(31)
            try:
                inflated = inflating.decompress(body)
            except zlib.error:  # it may have gone wrong beyond the limit
                return found, 0, (CallFault, MessageTooLarge)
            if len(inflated) > LIMIT_BYTES:
                return found, 0, (MessageTooLarge,)
            if not inflating.eof or inflating.unused_data:
                return found, 0, (CallFault,)
            body = inflated
        found.append(body)
        at += 5 + size
    return found, len(wire) - at, ()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "headers": headers,
    "messages": grpc_messages,
    "frames": frames,
    "raw": raw,
    "exchange": exchange,
}
