"""Asks render services for the exact tokens of prompts."""

from io import BytesIO
from typing import Final

import aiohttp

from epp.errors import NeedFailed
from epp.payload.render import UNREADABLE, RenderNeed
from epp.runtime.lent_sockets import lent_socket

IDLE_CONNECTIONS: Final = 16
ANSWER_BYTES: Final = 32 << 20
"""What an answer may have; of a picture it has a megabyte that nobody here reads."""

HELD_BYTES: Final = 256 << 20
"""Of bodies and answers at once; requests beyond that are not rendered.

A client that goes while its request waits gives its body back, but the service is asked on for a while.
"""

BUSY: Final = "busy"
UNREACHABLE: Final = "unreachable"
REFUSED: Final = "refused"

# A service's web server closes an idle connection after 5 s; a request must not meet that.
_KEPT_S: Final = 4.0
_SHOWN_BYTES: Final = 1024
_HEADERS: Final = {"content-type": "application/json"}
_LAST: Final = {**_HEADERS, "connection": "close"}


class Renders:
    """Fulfils `RenderNeed`s over HTTP/1.1. Not more than `IDLE_CONNECTIONS` connections stay open idly.

    Deadlines are the caller's: it cancels.

    Attributes:
        held: bytes of bodies and answers.
    """

    def __init__(self) -> None:
        self.held = 0
        self._session: aiohttp.ClientSession | None = None
        self._asking = 0

    async def __call__(self, need: RenderNeed) -> bytes:
        """The answer's body.

        Raises:
            NeedFailed: nobody answers, or with another status than 2xx, or with too much; too much is held.
        """
        size = len(need.body)
        self._make_room(need, size)
        # Of more requests at once than may stay open, each further one takes its connection with it.
        headers = _HEADERS if self._asking < IDLE_CONNECTIONS else _LAST
        self.held += size
        self._asking += 1
        try:
            return await self._asked(need, headers)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NeedFailed(UNREACHABLE, f"{need.url}: {type(error).__name__}: {error}") from None
        finally:
            self.held -= size
            self._asking -= 1

    async def _asked(self, need: RenderNeed, headers: dict[str, str]) -> bytes:
        self._session = session = self._session or _session()
        try:
            return await self._ask(session, need, headers)
        except aiohttp.ServerDisconnectedError:
            # The service had closed the connection before it was asked; rendering twice does no harm.
            return await self._ask(session, need, _LAST)

    async def _ask(self, session: aiohttp.ClientSession, need: RenderNeed, headers: dict[str, str]) -> bytes:
        # As a file it is sent in pieces; in one piece, a large body would hold up the event loop.
        asked = session.post(need.url, data=BytesIO(need.body), headers=headers, allow_redirects=False)
        async with asked as answer:
            if not 200 <= answer.status < 300:
                shown = (await answer.content.read(_SHOWN_BYTES)).decode(errors="replace")
                raise NeedFailed(REFUSED, f"{need.url}: status {answer.status}: {shown}")
            return await self._read(need, answer)

    async def _read(self, need: RenderNeed, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        try:
            async for piece in answer.content.iter_any():
                self._make_room(need, len(piece))
                self.held += len(piece)
                body += piece
                if len(body) > ANSWER_BYTES:
                    raise NeedFailed(UNREADABLE, f"{need.url}: the answer has more than {ANSWER_BYTES} bytes")
            return bytes(body)
        finally:
            self.held -= len(body)

    def _make_room(self, need: RenderNeed, size: int) -> None:
        if self.held + size > HELD_BYTES:
            raise NeedFailed(BUSY, f"{need.url}: requests that wait for it hold {self.held} bytes")

    async def close(self) -> None:
        """Close the connections; asked again, it opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S, socket_factory=lent_socket),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
