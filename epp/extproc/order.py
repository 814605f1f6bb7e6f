"""Which message may follow which in one direction of an exchange."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from epp.errors import ProtocolError
from epp.extproc.records import BodyMode, Direction


class Message(IntEnum):
    HEADERS = 0
    BODY = 1
    TRAILERS = 2


class Stage(IntEnum):
    """How far one direction has come.

    INITIAL: no headers yet. OPEN: the body, or trailers in place of it, may come.
    WHOLE: all came that a buffering proxy shows of the body. Trailers may follow: such a proxy marks the
    body as the end of the stream even then.
    ENDED: end of stream. TRAILED: trailers came.
    """

    INITIAL = 0
    OPEN = 1
    WHOLE = 2
    ENDED = 3
    TRAILED = 4


# Looking a member up on its class costs 100 ns in Python 3.11, more than the comparison it serves.
INITIAL: Final = Stage.INITIAL
OPEN: Final = Stage.OPEN
WHOLE: Final = Stage.WHOLE
ENDED: Final = Stage.ENDED
TRAILED: Final = Stage.TRAILED
NO_BODY: Final = BodyMode.NONE
STREAMED: Final = BodyMode.STREAMED
BUFFERED: Final = BodyMode.BUFFERED
BUFFERED_PARTIAL: Final = BodyMode.BUFFERED_PARTIAL
FULL_DUPLEX: Final = BodyMode.FULL_DUPLEX_STREAMED

# Whether a message is taken or dropped; what is not listed is illegal. A body message after the end is
# dropped: proxies have been seen to repeat the last one.
TAKEN: Final[Mapping[tuple[Message, Stage], bool]] = MappingProxyType(
    {
        (Message.HEADERS, INITIAL): True,
        (Message.BODY, OPEN): True,
        (Message.BODY, WHOLE): False,
        (Message.BODY, ENDED): False,
        (Message.TRAILERS, OPEN): True,
        (Message.TRAILERS, WHOLE): True,
    }
)


def is_buffered(mode: BodyMode) -> bool:
    """Whether one message carries all that is seen of the body."""
    return mode is BUFFERED or mode is BUFFERED_PARTIAL


def takes(direction: Direction, message: Message, stage: Stage, mode: BodyMode) -> bool:
    """True: the message is legal now. False: to be dropped. Raises ProtocolError otherwise."""
    taken = TAKEN.get((message, stage))
    if taken is None:
        what = f"{direction.value} {message.name.lower()} message"
        raise ProtocolError(f"{what} in state {stage.name.lower()} (body mode {mode.name})")
    return taken


def refuse_unsupported(direction: Direction, mode: BodyMode) -> None:
    """Raises ProtocolError for a body mode whose replies are not spoken here."""
    if mode is BodyMode.GRPC:
        raise ProtocolError(
            f"{direction.value}_body_mode GRPC is not supported; set FULL_DUPLEX_STREAMED, BUFFERED or NONE"
        )
