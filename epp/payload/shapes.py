"""What the answers of each HTTP API look like: one row for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from epp.payload import first_token
from epp.payload.records import Api
from epp.payload.renaming import OWN, Place
from epp.payload.usage import Counts, LastUsage, MessageUsage, OutputUsage, ResponseUsage

EXACT_BYTES: Final = 4 * 1024 * 1024
"""A plain answer, or one event of a stream, is read whole up to this length."""

TAIL_BYTES: Final = 64 * 1024
"""Of a longer one, so much of its end is kept."""

_BULKY_BYTES = 2 * TAIL_BYTES


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answers of one API are read.

    Attributes:
        counts: makes what reads the usage of one answer; None: such answers have none.
        has_token: whether the data of an event carries output.
        model: where the model's name stands in a plain answer; None: nowhere.
        model_in_events: the same for an event of a stream.
        kept_bytes: a plain answer, or an event, is read whole up to this length.
        read: False: nobody looks into the answer, whatever it is.
    """

    counts: Callable[[], Counts] | None
    has_token: Callable[[bytes], bool]
    model: Place | None = OWN
    model_in_events: Place | None = OWN
    kept_bytes: int = EXACT_BYTES
    read: bool = True


_RESPONSES = Shape(ResponseUsage, first_token.in_typed_event, model_in_events=Place(inside="response"))

UNREAD: Final = Shape(None, first_token.in_completions, model=None, model_in_events=None, read=False)

SHAPES: Final[Mapping[Api, Shape]] = MappingProxyType(
    {
        Api.CHAT: Shape(LastUsage, first_token.in_chat),
        Api.COMPLETIONS: Shape(LastUsage, first_token.in_completions),
        # Vectors and pictures are long, and their usage is at either end.
        Api.EMBEDDINGS: Shape(LastUsage, first_token.in_completions, kept_bytes=_BULKY_BYTES),
        Api.IMAGES: Shape(
            LastUsage,
            first_token.in_typed_event,
            model=None,
            model_in_events=None,
            kept_bytes=_BULKY_BYTES,
        ),
        Api.RESPONSES: _RESPONSES,
        Api.CONVERSATIONS: _RESPONSES,
        Api.CHAT_RENDER: Shape(None, first_token.in_completions),
        Api.COMPLETIONS_RENDER: Shape(None, first_token.in_completions, model=Place(each=True)),
        Api.MESSAGES: Shape(MessageUsage, first_token.in_messages, model_in_events=Place(inside="message")),
        Api.COUNT_TOKENS: UNREAD,
        Api.VLLM_GENERATE: Shape(LastUsage, first_token.in_completions),
        Api.SGLANG_GENERATE: Shape(OutputUsage, first_token.in_sglang, model=None, model_in_events=None),
        Api.PASSTHROUGH: UNREAD,
    }
)
