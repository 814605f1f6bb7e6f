import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

from tests.data.grpc.loops import Loop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio's loop; uvloop's too for tests whose mark asks for loops by name."""
    asked: list[Any] = [mark.kwargs.get("loop_factories") for mark in item.iter_markers("asyncio")]
    uv = {"uvloop": uvloop.new_event_loop} if any(asked) else {}
    return {"asyncio": Loop, **uv}
