"""Admin pages on loopback: the last decisions with their explanation. No prompt text is kept or shown."""

from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from epp.scheduling.explain import RecordedDecision, explain

DECISIONS_PATH = "/decisions"


def admin_app(decisions: Callable[[], Iterable[RecordedDecision]]) -> web.Application:
    """`GET /decisions?last=N&request_id=ID`: a JSON list of explanations, newest first."""

    async def show(request: web.Request) -> web.Response:
        last = request.query.get("last", "20")
        if not last.isascii() or not last.isdigit() or int(last) == 0:
            raise web.HTTPBadRequest(text=f"last={last}: write a whole number from 1 on\n")
        wanted = request.query.get("request_id")
        newest = list(decisions())[::-1]
        found = [each for each in newest if wanted is None or each.request_id == wanted][: int(last)]
        body = msgspec.json.encode([explain(each) for each in found])
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get(DECISIONS_PATH, show)
    return app


async def start_admin(app: web.Application, port: int) -> web.AppRunner:
    """Listen on loopback.

    Raises:
        OSError: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner
