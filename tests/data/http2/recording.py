"""Reads the recorded connections: frames, and the gRPC messages in them. Plain parsing, no HPACK."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chats", "traced")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0


def recorded(name: str) -> bytes:
    """All bytes that Envoy sent on the connection."""
    return Path(__file__).with_name(f"envoy-{name}.bin").read_bytes()


def frames(connection: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, stream and payload of each frame."""
    assert connection.startswith(PREFACE)
    at = len(PREFACE)
    while at < len(connection):
        length = int.from_bytes(connection[at : at + 3])
        stream = int.from_bytes(connection[at + 5 : at + 9])
        yield connection[at + 3], connection[at + 4], stream, connection[at + 9 : at + 9 + length]
        at += 9 + length


def messages(connection: bytes) -> dict[int, list[bytes]]:
    """The gRPC messages of each stream. No DATA frame is padded, no message compressed."""
    bodies: defaultdict[int, bytes] = defaultdict(bytes)
    for kind, _, stream, payload in frames(connection):
        if kind == DATA:
            bodies[stream] += payload
    return {stream: list(_cut(body)) for stream, body in bodies.items()}


def _cut(body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        assert body[at] == 0
        end = at + 5 + int.from_bytes(body[at + 1 : at + 5])
        yield body[at + 5 : end]
        at = end
