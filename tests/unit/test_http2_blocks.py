"""The blocks we write, read by an independent HPACK decoder."""

from collections.abc import Callable
from urllib.parse import unquote

import pytest
from hpack import Decoder
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.http2 import blocks
from epp.http2.codes import Status

Fields = list[tuple[str, str]]

DETAILS = (
    st.text(max_size=60)
    | st.text("ab %~é€😀\n", max_size=80)
    | st.builds(
        lambda text, times: text * times, st.text("a %é€😀", min_size=1, max_size=5), st.integers(800, 3000)
    )
)
CODES = st.sampled_from(Status)
HTTP_STATUSES = st.integers(100, 599) | st.sampled_from((200, 204, 206, 304, 400, 404, 405, 500))


def fields(block: bytes) -> Fields:
    """Read by a decoder that has seen nothing before; it must not have to remember anything either."""
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    decoder.header_table_size = 0
    read: Fields = []
    for name, value in decoder.decode(block, raw=True):
        read.append((name.decode("ascii"), value.decode("ascii")))
    assert not decoder.header_table.dynamic_entries
    return read


def test_the_answer_with_messages() -> None:
    assert fields(blocks.RESPONSE) == [(":status", "200"), ("content-type", "application/grpc")]
    assert blocks.RESPONSE[0] == 0x88
    assert fields(blocks.TRAILERS_OK) == [("grpc-status", "0")]
    assert blocks.trailers(Status.OK, "") == blocks.TRAILERS_OK


def test_an_answer_without_messages() -> None:
    assert fields(blocks.trailers_only(Status.UNIMPLEMENTED, "unknown service x")) == [
        (":status", "200"),
        ("content-type", "application/grpc"),
        ("grpc-status", "12"),
        ("grpc-message", "unknown service x"),
    ]
    assert fields(blocks.trailers_only(Status.UNIMPLEMENTED, "", encodings=True)) == [
        (":status", "200"),
        ("content-type", "application/grpc"),
        ("grpc-accept-encoding", "identity,gzip"),
        ("grpc-status", "12"),
    ]


@pytest.mark.parametrize(
    ("details", "encoded"),
    [
        ("plain text, with 'all' ASCII: !#$&~", "plain text, with 'all' ASCII: !#$&~"),
        ("100% ünïq", "100%25 %C3%BCn%C3%AFq"),
        ("two\r\nlines\x00\x7f", "two%0D%0Alines%00%7F"),
        (" ", "%20"),
        ("  at both ends  ", "%20 at both ends %20"),
        ("lone \ud800", "lone %3F"),
        ("€" * 500, "%E2%82%AC" * (blocks.DETAILS_BYTES // 9)),
        ("x" * 5000, "x" * blocks.DETAILS_BYTES),
        ("x" * (blocks.DETAILS_BYTES - 1) + " y", "x" * (blocks.DETAILS_BYTES - 1)),
        ("x" * (blocks.DETAILS_BYTES - 1) + " é", "x" * (blocks.DETAILS_BYTES - 1)),
        ("x" * (blocks.DETAILS_BYTES - 2) + "%", "x" * (blocks.DETAILS_BYTES - 2)),
    ],
)
def test_details_as_they_are_sent(details: str, encoded: str) -> None:
    assert fields(blocks.trailers(Status.INTERNAL, details)) == [
        ("grpc-status", "13"),
        ("grpc-message", encoded),
    ]


@pytest.mark.parametrize("size", [1, 126, 127, 128, 254, 255, 256, 4095, 4096])
def test_lengths_around_the_steps_of_the_integer(size: int) -> None:
    assert fields(blocks.trailers(Status.ABORTED, "x" * size))[-1] == ("grpc-message", "x" * size)


def test_the_integers_of_the_specification() -> None:
    """RFC 7541, C.1."""
    assert blocks._integer(10, 5) == b"\x0a"
    assert blocks._integer(1337, 5) == b"\x1f\x9a\x0a"


def details_come_back(status: Status, details: str) -> None:
    """What a client decodes is the text, or if that is too long its beginning; and it is legal in a field."""
    read = fields(blocks.trailers(status, details))
    assert read[0] == ("grpc-status", str(int(status)))
    sent = dict(read).get("grpc-message", "")
    assert len(read) == 1 + bool(details)
    assert sent == sent.strip()
    assert sent.isascii()
    assert sent.isprintable() or not sent
    assert len(sent) <= blocks.DETAILS_BYTES
    got = unquote(sent, errors="strict")
    whole = details.encode("utf-8", "replace").decode()
    assert whole.startswith(got)
    if got != whole:
        dropped = whole[len(got) :].lstrip(" ")[:1]
        spaces = len(whole) - len(got) - len(whole[len(got) :].lstrip(" "))
        assert len(sent) + spaces + 3 * len(dropped.encode()) > blocks.DETAILS_BYTES


def plain_reads(http_status: int, length: int) -> None:
    expected = [
        (":status", str(http_status)),
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(length)),
    ]
    if http_status == 405:
        expected.append(("allow", "POST"))
    assert fields(blocks.plain(http_status, length)) == expected


PROPERTIES: dict[str, Callable[[Callable[..., None]], Callable[[], None]]] = {
    "details": lambda settle: settle(given(CODES, DETAILS)(details_come_back)),
    "plain": lambda settle: settle(given(HTTP_STATUSES, st.integers(0, 10**9))(plain_reads)),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties(name: str) -> None:
    PROPERTIES[name](settings(max_examples=200, deadline=None))()


def test_every_status_of_http() -> None:
    for http_status in range(100, 600):
        plain_reads(http_status, 0)


def _faulty_integer(value: int, prefix_bits: int) -> bytes:
    full = (1 << prefix_bits) - 1
    return bytes((value,)) if value <= full else bytes((full, (value - full) & 0x7F))


@pytest.mark.parametrize(
    ("fault", "name", "value"),
    [
        ("long lengths", "_integer", _faulty_integer),
        ("% as it is", "_percent_encoded", lambda details: details.encode("ascii", "ignore").decode()),
        ("cut within a character", "_percent_encoded", lambda details: "%C3%A9" * 682 + "%C3"),
        ("no limit", "DETAILS_BYTES", 10**9),
        ("wrong index", "STATUS_INDEXES", {404: 14}),
        ("another wrong index", "CONTENT_LENGTH_INDEX", 29),
        (
            "named as indexed",
            "_literal",
            lambda name, value: b"\x40" + blocks._text("a") + blocks._text(value),
        ),
    ],
)
def test_properties_see(fault: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, name, value)
    seen = 0
    for property_of in PROPERTIES.values():
        attempt = property_of(
            settings(
                max_examples=200,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.generate,),
                report_multiple_bugs=False,
            )
        )
        try:
            attempt()
        except Exception:
            seen += 1
    assert seen, fault
