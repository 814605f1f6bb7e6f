"""Listeners of a test's own loop, closed so that nobody who has just come is left hanging."""

import asyncio


async def shut(*listeners: asyncio.Server) -> None:
    """None of them accepts any more. Connections that were accepted before stay.

    A server that is closed after the loop has accepted a connection for it, and before it was told, loses the
    connection: its client waits until the socket is collected as garbage, with a ResourceWarning.
    """
    loop = asyncio.get_running_loop()
    for listener in listeners:
        for each in listener.sockets:
            loop.remove_reader(each)
    try:
        await asyncio.sleep(0)
    finally:
        for listener in listeners:
            listener.close()
