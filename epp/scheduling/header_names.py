"""Names of headers as a configuration gives them."""

import re
from typing import Final

_TOKEN: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
# They describe one hop, or the body that is sent: an answer that has them set anew is cut off or misread.
_OF_THE_MESSAGE: Final = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def header_name(text: str) -> str:
    """The name as a proxy tells it: without spaces around it, in lower case. Empty stays empty.

    Raises:
        ValueError: no header can have this name; says what would be right.
    """
    name = text.strip().lower()
    if name and not _TOKEN.fullmatch(name):
        raise ValueError(
            f"{text[:60]!r} is no header name; use letters, digits and hyphens, as in x-session-id"
        )
    return name


def settable_header_name(text: str) -> str:
    """`header_name` of a header that is set on answers.

    Raises:
        ValueError: as `header_name`, and for headers that belong to the message itself.
    """
    name = header_name(text)
    if name in _OF_THE_MESSAGE:
        raise ValueError(f"{name} describes the message itself; use a header of your own, as in x-session-id")
    return name
