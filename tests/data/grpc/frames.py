"""Frames of gRPC messages that are not as they should be."""

import random


def broken(draw: random.Random, body: bytes, most: int) -> bytes:
    """Bytes changed, taken out and put in, at `most` places; the frame's length sometimes mended."""
    wire = bytearray(body)
    for _ in range(draw.randint(0, most)):
        at = draw.randrange(len(wire) + 1)
        match draw.randrange(3):
            case 0:
                wire[at : at + 1] = draw.randbytes(1)
            case 1:
                del wire[at : at + draw.randint(1, 9)]
            case _:
                wire[at:at] = draw.randbytes(draw.randint(1, 9))
    if draw.random() < 0.7 and len(wire) >= 5:
        wire[:5] = b"\0" + (len(wire) - 5).to_bytes(4)
    return bytes(wire)
