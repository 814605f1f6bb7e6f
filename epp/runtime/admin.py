"""Admin pages on loopback: the last decisions with their explanation. No prompt text is kept or shown."""

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from epp.runtime.explanations import DECISIONS_PATH
from epp.scheduling.explain import RecordedDecision, explain

_MOST_DIGITS = 6


def admin_app(decisions: Callable[[], Iterable[RecordedDecision]]) -> web.Application:
    """`GET /decisions?last=N&request_id=ID`: a JSON list of explanations, newest first."""

    async def show(request: web.Request) -> web.Response:
        last = request.query.get("last", "20")
        if not (last.isascii() and last.isdigit() and len(last) <= _MOST_DIGITS and int(last)):
            raise web.HTTPBadRequest(text=f"last={last[:20]}: write a whole number from 1 on\n")
        wanted = request.query.get("request_id")
        newest = list(decisions())[::-1]
        found = [each for each in newest if wanted is None or each.request_id == wanted][: int(last)]
        # Hundreds of endpoints take milliseconds each, which requests should not have to wait for.
        body = await asyncio.to_thread(_explained, found)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get(DECISIONS_PATH, show)
    return app


def _explained(found: list[RecordedDecision]) -> bytes:
    return msgspec.json.encode([explain(each) for each in found])


async def start_admin(app: web.Application, port: int) -> web.AppRunner:
    """Listen on loopback.

    Raises:
        OSError: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
