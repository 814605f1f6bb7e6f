"""Ext-proc streams over sockets against a running picker, ended in every way there is: nothing may stay.

    python -m benchmarks.soak [--streams N] [--connections N] [--transport NAME] [--seed N] [--json FILE]

`warmroute serve` runs in a process of its own. Some streams are whole exchanges, whose replies are checked;
others are reset, half-closed, cut in the middle of a message, refused or illegal, at any stage. Each
connection serves some hundred streams, then ends with others still open on it: closed, reset, by a frame
that is none. After each fifth of the streams everything settles: what is in flight must be nothing, and
memory what it was after the first fifth. Exits with 1 where it is not.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import count, islice
from pathlib import Path

import aiohttp
import click
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.rows.children import page_server, serve
from benchmarks.rows.machine import resident_mib
from benchmarks.rows.traffic import Chats, answer_messages, plain_answer, request_messages, sse_chunks
from benchmarks.soak_client import Link, Stream
from epp import names
from epp.lab.stack import free_ports
from epp.runtime.options import OWN, TRANSPORTS
from epp.wire.ext_proc_pb2 import ProcessingResponse

ENDPOINTS = 4
ROUNDS = 5
BODIES = 200
BODY_BYTES = (400, 2_000, 20_000, 150_000)
LARGE_BYTES = 2_200_000
"""Read by the picker's decoding process. One request of so many has it:"""
LARGE_EVERY = 400
SETTLE_S = 60.0
GROWTH_MIB = 8.0
"""How much more the picker may hold at the end than after the first round: what its allocator keeps."""
WARM_STREAMS = 5_000
"""After fewer streams in the first round it is not warm, and says nothing of memory."""

IN_FLIGHT = (
    "request_running",
    "inflight_requests",
    "inflight_tokens",
    "extproc_streams_inflight",
    "extproc_held_bytes",
)
GARBAGE = b"\xff\xff\xff"


# -- what streams do --------------------------------------------------------------------------------


class Way(StrEnum):
    """How a stream ends, if its connection lasts so long."""

    WHOLE = "whole"
    RESET = "reset"
    RESET_IN_MESSAGE = "reset in a message"
    HALF_CLOSED = "half-closed"
    HALF_CLOSED_IN_MESSAGE = "half-closed in a message"
    ILLEGAL = "illegal"
    REFUSED = "refused"


SHARES = {
    Way.WHOLE: 35,
    Way.RESET: 25,
    Way.RESET_IN_MESSAGE: 10,
    Way.HALF_CLOSED: 10,
    Way.HALF_CLOSED_IN_MESSAGE: 5,
    Way.ILLEGAL: 5,
    Way.REFUSED: 10,
}
LOST = "connection lost"
WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Course:
    """One stream: what it says, and after how many of its messages it ends in its way."""

    way: Way
    body: bytes
    request: list[bytes]
    answer: list[bytes]
    cut: int


class Courses:
    """Endless courses. Prompts come again, so that the picker's index of them does not grow for ever."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        chats = [Chats(size, seed) for seed, size in enumerate(BODY_BYTES)]
        self._bodies = [next(chats[index % len(chats)]) for index in range(BODIES)]
        self._large = next(Chats(LARGE_BYTES, 99))
        served = "127.0.0.1:1"
        self._answers = [
            answer_messages([plain_answer()], served, "application/json"),
            answer_messages(sse_chunks(6), served, "text/event-stream"),
        ]
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Course]:
        return self

    def __next__(self) -> Course:
        draw, index = self._draw, next(self._numbers)
        (way,) = draw.choices(list(SHARES), list(SHARES.values()))
        body = self._large if index % LARGE_EVERY == 0 else draw.choice(self._bodies)
        if way is Way.REFUSED:
            body = body[:-1]
        request = request_messages(body, index)
        answer = draw.choice(self._answers)
        whole = way in (Way.WHOLE, Way.REFUSED)
        cut = len(request) + len(answer) if whole else draw.randrange(len(request) + len(answer))
        return Course(way, body, request, answer, cut)


async def play(link: Link, course: Course) -> str:
    """What became of the stream: its way, LOST or WRONG."""
    stream = link.open()
    messages = course.request + course.answer
    for index, message in enumerate(messages[: course.cut]):
        if index == len(course.request):
            await stream.replied(1)
            if stream.over:
                break
        await link.send(stream, framed(message))
    match course.way:
        case Way.RESET:
            link.reset(stream)
        case Way.RESET_IN_MESSAGE:
            await link.send(stream, half(messages[course.cut]))
            link.reset(stream)
        case Way.HALF_CLOSED:
            link.half_close(stream)
        case Way.HALF_CLOSED_IN_MESSAGE:
            await link.send(stream, half(messages[course.cut]))
            link.half_close(stream)
        case Way.ILLEGAL:
            await link.send(stream, framed(GARBAGE))
    if not stream.reset:
        await stream.ended()
    if link.ending:
        return LOST
    return course.way if is_right(course, stream) else WRONG


def is_right(course: Course, stream: Stream) -> bool:
    """Whether what came is what had to come of this course."""
    match course.way:
        case Way.WHOLE:
            return stream.status == "0" and is_whole(course, stream.replies)
        case Way.REFUSED:
            (reply,) = stream.replies or [b""]
            return ProcessingResponse.FromString(reply).immediate_response.status.code == 400
        case Way.ILLEGAL:  # refused already, or waiting for its pick behind the broken message
            return stream.status == "3"
        case Way.HALF_CLOSED:
            return stream.status == "0"
        case Way.HALF_CLOSED_IN_MESSAGE:
            return stream.status in ("0", "13")  # gRPC's library does not look; ours does
        case _:
            return True


def is_whole(course: Course, replies: list[bytes]) -> bool:
    """A pick, the body as it was, and a reply to each message of the answer."""
    read = [ProcessingResponse.FromString(reply) for reply in replies]
    kinds = [each.WhichOneof("response") for each in read]
    pieces = kinds.count("request_body")
    bodies = [each.request_body.response.body_mutation.streamed_response for each in read[1 : 1 + pieces]]
    answered = ["response_headers", *["response_body"] * (len(course.answer) - 1)]
    return (
        kinds == ["request_headers", *["request_body"] * pieces, *answered]
        and b"".join(each.body for each in bodies) == course.body
        and len(read[0].request_headers.response.header_mutation.set_headers) > 0
    )


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4) + message


def half(message: bytes) -> bytes:
    return framed(message)[: 5 + len(message) // 2]


# -- the run ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """Of one run.

    Attributes:
        became: how streams ended, by `Way`, LOST and WRONG.
        codes: the picker's own count of them.
        resident: MiB of the picker and its decoding process after each round.
        left: what was in flight when all was over, and is not nothing.
        complaints: lines of the picker's log that tell of faults.
    """

    streams: int
    transport: str
    seed: int
    seconds: float = 0.0
    connections: int = 0
    became: dict[str, int] = field(default_factory=dict)
    codes: dict[str, float] = field(default_factory=dict)
    resident: list[list[float]] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """What should not be; nothing, where all is well."""
        for name, value in self.left.items():
            yield f"{name} is still {value:g}"
        if wrong := self.became.get(WRONG):
            yield f"{wrong} streams did not get what they should"
        if missing := self.streams - sum(self.became.values()):
            yield f"{missing} streams have no end"
        if self.streams >= WARM_STREAMS * ROUNDS:
            yield from self._grown()
        yield from self.complaints

    def _grown(self) -> Iterator[str]:
        first, last = self.resident[0], self.resident[-1]
        for name, before, after in zip(("picker", "decoding process"), first, last, strict=False):
            if after > before + GROWTH_MIB:
                yield f"the {name} grew from {before:.1f} to {after:.1f} MiB"


async def soak(port: int, metrics_port: int, pid: int, report: Report, connections: int) -> None:
    """Fill in the report of a picker that runs."""
    draw = random.Random(report.seed)
    courses = iter(Courses(draw))
    began = time.monotonic()
    for rounds in range(ROUNDS):
        share = report.streams * (rounds + 1) // ROUNDS - report.streams * rounds // ROUNDS
        todo = islice(courses, share)
        await asyncio.gather(*(lane(port, todo, draw, report) for _ in range(connections)))
        ended = sum(report.became.values()) - report.became.get(LOST, 0)
        report.left, report.codes = await settled(metrics_port, ended)
        report.resident.append([round(resident_mib(each), 1) for each in (pid, *children(pid))])
    report.seconds = round(time.monotonic() - began, 1)


async def lane(port: int, courses: Iterator[Course], draw: random.Random, report: Report) -> None:
    """One connection after the other, until there are no more courses."""
    while True:
        ran = await connection(port, islice(courses, draw.randrange(1, 400)), draw, report)
        if not ran:
            return


async def connection(port: int, courses: Iterator[Course], draw: random.Random, report: Report) -> int:
    """How many streams it had. Who finds no more to do ends it, whatever the others are doing."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(Link, "127.0.0.1", port)
    report.connections += 1
    ran = 0

    async def streams() -> None:
        nonlocal ran
        for course in courses:
            ran += 1
            end = await play(link, course)
            report.became[end] = report.became.get(end, 0) + 1
            if link.ending:
                return
        link.end(draw)

    await asyncio.gather(*(streams() for _ in range(draw.choice((1, 4, 16)))))
    return ran


async def settled(metrics_port: int, ended: int) -> tuple[dict[str, float], dict[str, float]]:
    """What is in flight and does not go away, and the streams that the picker has counted, by status.

    `ended`: how many it must have counted before it has heard of all. Of lost ones it may know nothing.
    """
    deadline = time.monotonic() + SETTLE_S
    left: dict[str, float] = {}
    async with aiohttp.ClientSession() as session:
        while True:
            await asyncio.sleep(0.3)  # gauges are renewed now and then
            async with session.get(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
                page = await answer.text()
            totals: dict[str, float] = {}
            codes: dict[str, float] = {}
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    name = sample.name.removeprefix(names.METRIC_PREFIX)
                    totals[name] = totals.get(name, 0.0) + sample.value
                    if sample.name == f"{names.METRIC_PREFIX}extproc_streams_total":
                        codes[" ".join(sample.labels.values())] = sample.value
            left = {name: totals[name] for name in IN_FLIGHT if totals.get(name)}
            heard = sum(codes.values()) >= ended
            if (heard and not left) or time.monotonic() > deadline:
                return left, codes


def children(pid: int) -> list[int]:
    """The last process that it started, if any."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return sorted(found)[-1:]


def run(streams: int, connections: int, transport: str, seed: int) -> Report:
    """Start a picker, and soak it."""
    report = Report(streams, transport, seed)
    (metrics_port,) = free_ports(1)
    flags = (
        *("--metrics-port", str(metrics_port), "--refresh-prometheus-metrics-interval=100ms"),
        f"--transport={transport}",
    )
    with tempfile.TemporaryDirectory() as folder, page_server(ENDPOINTS) as ports:
        with serve(Path(folder), ports, *flags) as picker:
            uvloop.run(soak(picker.grpc_port, metrics_port, picker.pid, report, connections))
        lines = Path(folder, "serve.log").read_text().splitlines()
        report.complaints += [line for line in lines if "Traceback" in line or '"level":"error"' in line]
    return report


@click.command()
@click.option("--streams", default=50_000, show_default=True, type=click.IntRange(ROUNDS))
@click.option("--connections", default=8, show_default=True, type=click.IntRange(1), help="At one time.")
@click.option("--transport", default=OWN, show_default=True, type=click.Choice(TRANSPORTS))
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures.")
def main(streams: int, connections: int, transport: str, seed: int, file: Path | None) -> None:
    """Soak the picker's transport, and say what it left behind."""
    report = run(streams, connections, transport, seed)
    print(f"{streams} streams on {report.connections} connections in {report.seconds:g} s, {transport}")
    print("they were:", ", ".join(f"{kind} {each}" for kind, each in sorted(report.became.items())))
    print("the picker counted:", ", ".join(f"{code} {each:g}" for code, each in report.codes.items()))
    print("resident after each round, picker and decoding process, MiB:", report.resident)
    if file is not None:
        file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    problems = list(report.problems())
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
