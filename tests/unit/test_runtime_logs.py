"""Log lines in both formats."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from epp.runtime import logs

HOSTILE = 'a"b\n2026 ERROR forged \x1b[2J\ud800'


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    """`set_up` is the process's; pytest has its own."""
    root, ours, requests = map(logging.getLogger, ("", "epp", logs.REQUESTS))
    before = root.handlers[:], root.level, ours.level, requests.level
    yield
    root.handlers[:], root.level, ours.level, requests.level = before


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {
            "name": "epp.x",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "said %s",
            "args": ("so",),
        }
    )
    vars(made).update(extra, created=1_700_000_000.5, msecs=500.0)
    return made


def test_a_json_line_has_the_fields_of_the_fields_pickers() -> None:
    line = logs.JsonLines().format(record(request_id="r", status=503, what=None))
    assert json.loads(line) == {
        "level": "warning",
        "ts": "2023-11-14T22:13:20.500Z",
        "logger": "epp.x",
        "msg": "said so",
        "request_id": "r",
        "status": 503,
        "what": None,
    }


def test_a_json_line_is_one_line_whatever_a_client_sent() -> None:
    line = logs.JsonLines().format(record(model=HOSTILE, odd=object(), many={"a": [1]}))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["model"] == HOSTILE


def test_a_console_line_is_one_line_whatever_a_client_sent() -> None:
    line = logs.Console().format(record(model=HOSTILE, request_id="r-1", note="two words"))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.split(" ", 1)[1].startswith('WARNING said so model="a\\"b\\n2026')
    assert line.endswith('request_id=r-1 note="two words"')


@pytest.mark.parametrize("formatter", [logs.JsonLines(), logs.Console()])
def test_an_exception_brings_its_trace(formatter: logging.Formatter) -> None:
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        text = formatter.format(record(exc_info=sys.exc_info()))
    assert "RuntimeError: planted" in text
    if isinstance(formatter, logs.JsonLines):
        assert "RuntimeError: planted" in json.loads(text)["stacktrace"]


@pytest.mark.parametrize(
    ("encoder", "terminal", "as_json"),
    [("", False, True), ("", True, False), ("json", True, True), ("console", False, False)],
)
def test_the_format_follows_the_flag_and_else_the_terminal(
    encoder: str,
    terminal: bool,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logs.set_up(encoder, 2)
    logging.getLogger("epp.x").info("said", extra={"a": 1})
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "said" in each)
    assert line.startswith("{") is as_json


@pytest.mark.parametrize(
    ("verbosity", "said"),
    [
        (-1, ["error"]),
        (0, ["error", "warning", "info"]),
        (2, ["error", "warning", "info"]),
        (3, ["error", "warning", "info", "request"]),
        (4, ["error", "warning", "info", "request", "debug"]),
    ],
)
def test_what_is_logged_at_which_verbosity(
    verbosity: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up("json", verbosity)
    for level in ("error", "warning", "info"):
        getattr(logging.getLogger("epp.x"), level)(level)
    logging.getLogger(logs.REQUESTS).info("request")
    logging.getLogger("epp.x").debug("debug")
    logging.getLogger("other").info("not ours")
    written = map(json.loads, capsys.readouterr().err.splitlines())
    # Whatever else the process has to say meanwhile is not asked about.
    asked = {"epp.x", logs.REQUESTS, "other"}
    assert [line["msg"] for line in written if line["logger"] in asked] == said
