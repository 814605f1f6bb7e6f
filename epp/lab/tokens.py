"""Text as the lab's engines see it: four bytes of UTF-8 are one token.

A prompt's *identity* is a byte string of whole tokens. The chat template keeps every message on a
token boundary and puts the answer right after the prompt, so that the next turn, which repeats the
answer as an assistant message, extends the bytes of prompt and output exactly.
"""

from collections.abc import Iterable, Sequence
from hashlib import shake_128
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

TOKEN_BYTES: Final = 4
END_OF_MESSAGE: Final = b"<|/>"
ANSWER: Final = "assistant"

_VOCABULARY: Final = (
    b"the and for are but not you all any can her was one our out day get has him his how man new now "
    b"old see two way who boy did its let put say she too use dad mom act add age ago air arm art ask "
    b"bad bag bar bed bet big bit box buy cup cut dog ear eat egg end "
)
WORDS: Final = tuple(_VOCABULARY[start : start + TOKEN_BYTES] for start in range(0, len(_VOCABULARY), 4))
"""The 64 words an answer is made of, one token each."""


def from_text(text: str) -> bytes:
    """Identity of a plain prompt; a last incomplete token is filled up."""
    return _whole(text.encode())


def from_token_ids(token_ids: Sequence[int]) -> bytes:
    """Identity of a prompt given as token ids, each in 0..2**32-1 (OverflowError otherwise)."""
    return b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in token_ids])


def from_chat(messages: Iterable[tuple[str, str]]) -> bytes:
    """Identity of a chat: (role, content) in order, then the opening of the answer."""
    parts: list[bytes] = []
    for role, content in messages:
        parts += (_opening(role), _whole(content.encode()), END_OF_MESSAGE)
    parts.append(_opening(ANSWER))
    return b"".join(parts)


def token_count(identity: bytes) -> int:
    return len(identity) // TOKEN_BYTES


def block_keys(identity: bytes, block_size: int, parent: int) -> list[int]:
    """Chained keys of the full blocks of `block_size` tokens. `parent` is the key before the first."""
    step = block_size * TOKEN_BYTES
    view = memoryview(identity)
    keys = []
    for start in range(0, len(identity) - step + 1, step):
        parent = xxh3_64_intdigest(view[start : start + step], seed=parent)
        keys.append(parent)
    return keys


def answer_words(identity: bytes, count: int) -> list[bytes]:
    """The answer to a prompt, one token each: equal on every engine; shorter answers are its prefixes."""
    return [WORDS[byte & 63] for byte in shake_128(xxh3_128_digest(identity)).digest(count)]


def _opening(role: str) -> bytes:
    return _whole(f"<|{role}|>".encode())


def _whole(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % TOKEN_BYTES)
