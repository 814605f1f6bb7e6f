"""A full-duplex body cut to the size that the proxy takes in one message."""

from epp.extproc.records import BODY_CHUNK_BYTES, Direction, Effect, Send, StreamedBodyReply


def pieces(direction: Direction, body: bytes, end_of_stream: bool) -> list[Effect]:
    """Replies that carry `body`; with `end_of_stream` the last one ends it, and there is at least one."""
    size = len(body)
    if size <= BODY_CHUNK_BYTES:
        if not body and not end_of_stream:
            return []
        return [Send(StreamedBodyReply(direction, body, end_of_stream))]
    return [
        Send(
            StreamedBodyReply(
                direction,
                body[start : start + BODY_CHUNK_BYTES],
                end_of_stream and start + BODY_CHUNK_BYTES >= size,
            )
        )
        for start in range(0, size, BODY_CHUNK_BYTES)
    ]
