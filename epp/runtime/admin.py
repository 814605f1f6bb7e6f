"""Admin pages: the last decisions with their explanation, and what the picker is and sees just now.

No prompt text is kept or shown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from epp.runtime.explanations import DECISIONS_PATH
from epp.scheduling.explain import RecordedDecision, explain

SIGNALS_PATH: Final = "/signals"
CONFIG_PATH: Final = "/config"
JSON: Final = "application/json"
TEXT: Final = "text/plain"
LOOPBACK: Final = "127.0.0.1"

_MOST_DIGITS = 6
_MOST_SHOWN = 200
log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.Response]]


class Page(NamedTuple):
    """What is answered to GET. `make` runs on the event loop's thread."""

    content_type: str
    make: Callable[[], bytes]


def admin_app(
    decisions: Callable[[], Iterable[RecordedDecision]],
    pages: Mapping[str, Page] = MappingProxyType({}),
) -> web.Application:
    """`GET /decisions?last=N&request_id=ID`: a JSON list of explanations, newest first. `pages`: by path."""

    async def show(request: web.Request) -> web.Response:
        last = request.query.get("last", "20")
        if not (last.isascii() and last.isdigit() and len(last) <= _MOST_DIGITS and int(last)):
            raise web.HTTPBadRequest(text=f"last={last[:20]}: write a whole number from 1 on\n")
        wanted = request.query.get("request_id")
        newest = list(decisions())[::-1]
        found = [each for each in newest if wanted is None or each.request_id == wanted][: int(last)]
        # Hundreds of endpoints take milliseconds each, which requests should not have to wait for.
        body = await asyncio.to_thread(_explained, found)
        return web.Response(body=body, content_type=JSON)

    app = web.Application()
    app.router.add_get(DECISIONS_PATH, show)
    for path, page in pages.items():
        app.router.add_get(path, _handler(page))
    return app


def _handler(page: Page) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=page.make(), content_type=page.content_type, charset="utf-8")

    return answer


def _explained(found: list[RecordedDecision]) -> bytes:
    return msgspec.json.encode([explain(each) for each in found])


async def start_admin(app: web.Application, port: int, host: str = LOOPBACK) -> web.AppRunner:
    """Listen on `host`; empty: on all addresses.

    Raises:
        OSError: the port is taken, or the host is none of this machine's.
    """
    log.addFilter(_told_in_a_line)
    runner = web.AppRunner(app, access_log=None, logger=log)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _told_in_a_line(record: logging.LogRecord) -> bool:
    """What is no HTTP/1.1, as from a scanner, is no fault of ours: one line, without a stack trace."""
    fault = record.exc_info[1] if record.exc_info else None
    if not isinstance(fault, HttpProcessingError):
        return True
    record.exc_info = None
    record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    record.msg, record.args = "admin port: what came is no HTTP/1.1", ()
    record.fault = fault.message.partition("\n")[0][:_MOST_SHOWN]
    return log.isEnabledFor(logging.INFO)
