"""Plays a plan of turns against an OpenAI API and measures what a client sees."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from epp.lab.workload import Message, Turn
from epp.payload.answer import AnswerReader
from epp.payload.records import Api, Usage

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn as its client saw it. `ttft_s` is None and `error` set where no token came."""

    turn: Turn
    started_s: float
    ttft_s: float | None
    duration_s: float
    usage: Usage | None
    error: str | None = None


@dataclass(slots=True)
class Run:
    """A plan while it is played."""

    total: int
    started_at: float
    answered: list[Answered] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


_CHUNK = msgspec.json.Decoder(_Chunk)


async def play(
    turns: Sequence[Turn],
    *,
    url: str,
    model: str,
    speed_up: float = 1.0,
    progress: Callable[[Run], None] = lambda run: None,
) -> list[Answered]:
    """Play every turn at its time; returns them in the order of the plan.

    A turn waits for the answer before it in its chat. If that answer failed, the chat goes on without it,
    as a person who asks again would.
    """
    run = Run(len(turns), time.monotonic())
    chats: dict[int, list[Turn]] = {}
    for turn in turns:
        chats.setdefault(turn.chat, []).append(turn)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for chat in chats.values():
            tasks.create_task(_play_chat(session, run, chat, url, model, speed_up, progress))
    return sorted(run.answered, key=lambda answered: answered.turn.id)


async def _play_chat(
    session: aiohttp.ClientSession,
    run: Run,
    turns: Sequence[Turn],
    url: str,
    model: str,
    speed_up: float,
    progress: Callable[[Run], None],
) -> None:
    history: tuple[Message, ...] = ()
    for turn in turns:
        await asyncio.sleep(turn.delay_s / speed_up)
        asked = (*history, *turn.messages)
        answered, text = await _ask(session, run, turn, asked, url, model)
        history = (*asked, ("assistant", text)) if text else asked
        run.answered.append(answered)
        progress(run)


async def _ask(
    session: aiohttp.ClientSession,
    run: Run,
    turn: Turn,
    messages: Sequence[Message],
    url: str,
    model: str,
) -> tuple[Answered, str]:
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    started_s = run.elapsed_s
    reader = AnswerReader(Api.CHAT, model, model)
    raw = bytearray()
    ttft_s = None
    error = None
    try:
        async with session.post(
            url + "/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            reader.begin(response.status, response.headers.get("content-type", ""), "")
            async for chunk in response.content.iter_any():
                raw += chunk
                reader.feed(chunk, False)
                if ttft_s is None and reader.first_token:
                    ttft_s = run.elapsed_s - started_s
            if response.status != 200:
                error = f"status {response.status}: {bytes(raw[:200]).decode(errors='replace')}"
    except (aiohttp.ClientError, TimeoutError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    if error is None and (ttft_s is None or reader.usage is None):
        error = "the answer ended before its usage"
    duration_s = run.elapsed_s - started_s
    return Answered(turn, started_s, ttft_s, duration_s, reader.usage, error), _text(
        raw
    ) if error is None else ""


def _text(raw: bytes | bytearray) -> str:
    """The content of all deltas of a complete stream."""
    parts = []
    for line in bytes(raw).split(b"\n"):
        if line.startswith(b"data: {"):
            parts += [choice.delta.content or "" for choice in _CHUNK.decode(line[6:]).choices]
    return "".join(parts)
