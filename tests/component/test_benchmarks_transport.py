"""The transport benchmark works from end to end, and its load generator sees what is wrong with a server."""

import asyncio
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import transport
from benchmarks.transport_server import ADDRESS, transport_of
from epp.errors import ProtocolError
from epp.runtime.stream import Stream
from epp.wire.ext_proc_pb2 import ProcessingResponse
from tools.go_programs import built, go_missing

pytestmark = [
    pytest.mark.go,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(go_missing()), reason=go_missing()),
]

SHORT = ("-warm", "50ms", "-time", "200ms", "-half-close")


@pytest.mark.parametrize(
    ("shapes", "servers"),
    [
        (["chat"], transport.SERVERS),
        (["pair-tls", "body-2m", "streams-1000"], ("own", "grpcio-bare", "anchor")),
        (["beside-decisions"], ("own", "own-bare", "anchor")),
    ],
    ids=["every-server", "shapes", "stand-ins"],
)
def test_servers_take_turns(shapes: list[str], servers: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--smoke", "--json", str(file)]
    for name in shapes:
        arguments += ["--shapes", name]
    for name in servers:
        arguments += ["--servers", name]
    done = CliRunner().invoke(transport.main, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    met = [
        (shape, server)
        for shape in shapes
        for server in servers
        if transport.meets(server, transport.SHAPES[shape])
    ]
    assert [(row["shape"], row["server"]) for row in report["rows"]] == met
    for row in report["rows"]:
        assert row["failures"] == 0, row
        assert row["cpu_us"]["min"] > 0
        assert row["resident_mib"]["min"] > 1
        assert (row["of_anchor"] == 1) == (row["server"] == "anchor")
        assert row["runs"][0]["calibration_ms"] > 0
        assert f"{row['shape']:<18} {row['server']:<12}" in done.output


async def load(port: int, *arguments: str) -> dict[str, Any]:
    """What the load generator tells of a server in this process."""
    process = await asyncio.create_subprocess_exec(
        *(
            str(built(transport.MODULE, "./loadgen")),
            "-address",
            f"127.0.0.1:{port}",
            "-pid",
            str(os.getpid()),
        ),
        *SHORT,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    told: dict[str, Any] = json.loads(said)
    assert process.returncode == bool(told["failures"])
    return told


@pytest.mark.parametrize("name", ["own", "grpcio"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("-streams", "4"),
        ("-streams", "4", "-chunks", "1", "-traced"),
        ("-streams", "4", "-chunks", "20", "-pipelined", "-connections", "2"),
        ("-streams", "4", "-chunks", "5", "-gap", "5ms", "-rate", "50"),
        ("-streams", "2", "-body", "300000"),
    ],
)
async def test_a_sound_server_has_no_failures(name: str, arguments: tuple[str, ...]) -> None:
    server = transport_of(name)
    port = await server.start(ADDRESS)
    try:
        told = await load(port, *arguments)
    finally:
        await server.stop()
    assert told["failure_texts"] == []
    assert told["picks"] > 0
    assert (told["pairs"] > 0) == ("-chunks" in arguments)


class _Faulty(Stream):
    """Its replies are `spoilt` on their way out."""

    __slots__ = ()

    def received(self, message: bytes) -> None:
        super().received(message)
        replies = [ProcessingResponse.FromString(reply) for reply in self.outbox]
        self.outbox = deque(reply.SerializeToString() for reply in self.spoilt(replies))

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        raise NotImplementedError


class OneByteDiffers(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        for reply in replies:
            streamed = reply.response_body.response.body_mutation.streamed_response
            if reply.WhichOneof("response") == "response_body":
                streamed.body = streamed.body[:-1] + b"~"
        return replies


class PartOfTheQuestionIsLost(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        for reply in replies:
            if reply.WhichOneof("response") == "request_body":
                streamed = reply.request_body.response.body_mutation.streamed_response
                streamed.body = streamed.body[:-1]
        return replies


class ReplyTwice(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        return [copy for reply in replies for copy in (reply, reply)]


class NoReply(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        return [reply for reply in replies if reply.WhichOneof("response") != "response_headers"]


class AnotherKind(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        for reply in replies:
            if reply.WhichOneof("response") == "response_headers":
                reply.request_headers.SetInParent()
        return replies


class MetadataDiffers(_Faulty):
    __slots__ = ()

    def spoilt(self, replies: list[ProcessingResponse]) -> list[ProcessingResponse]:
        for reply in replies:
            reply.ClearField("dynamic_metadata")
        return replies


class EndsEarly(Stream):
    __slots__ = ()

    def received(self, message: bytes) -> None:
        super().received(message)
        if any(ProcessingResponse.FromString(reply).HasField("response_headers") for reply in self.outbox):
            raise ProtocolError("no more of this")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (OneByteDiffers, "the body differs from what was sent"),
        (PartOfTheQuestionIsLost, "bytes of the body"),
        (ReplyTwice, "a reply of kind 1 came in place of 3"),
        (NoReply, "got no reply in"),
        (AnotherKind, "were answered by a reply of kind 1"),
        (MetadataDiffers, "the metadata"),
        (EndsEarly, 'ended the stream early, or not well: status "3"'),
    ],
)
async def test_load_generator_sees_faults(fault: type[Stream], words: str) -> None:
    server = transport_of("grpcio", make=fault)
    port = await server.start(ADDRESS)
    try:
        # Only what gets no reply at all is waited for so long.
        patience = "2s" if fault is NoReply else "60s"
        told = await load(port, "-streams", "2", "-chunks", "4", "-patience", patience)
    finally:
        await server.stop()
    assert told["failures"] > 0
    assert words in told["failure_texts"][0]
