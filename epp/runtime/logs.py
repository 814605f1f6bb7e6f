"""Log lines: JSON objects in an image, one readable line on a terminal. Prompt text is never logged."""

import json
import logging
import sys
import time

REQUESTS = "epp.requests"
"""Logger of the one line that each request has, where there are any."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonLines(logging.Formatter):
    """`{"level","ts","logger","msg",...}`, the shape of the field's pickers."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "level": record.levelname.lower(),
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "logger": record.name,
            "msg": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["stacktrace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Console(logging.Formatter):
    """`12:34:56 INFO    message key=value ...`, in one line but for a stack trace."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {key}={_one_line(str(value))}" for key, value in _extra(record).items())
        line = f"{clock} {record.levelname:<7} {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(value: str) -> str:
    """Clients choose model names and request ids; none of them gets to write a line of its own."""
    return value if value.isprintable() and " " not in value else json.dumps(value)


def set_up(encoder: str, verbosity: int) -> None:
    """Log to stderr, as `encoder` says (json, console; empty: by what stderr is).

    From verbosity 3 on there is a line for each request, from 4 on what is for developers; below 0 errors
    only.
    """
    as_json = encoder == "json" or (not encoder and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.ERROR if verbosity < 0 else logging.WARNING)
    logging.getLogger("epp").setLevel(_level(verbosity))
    logging.getLogger(REQUESTS).setLevel(logging.INFO if verbosity >= 3 else logging.WARNING)


def _level(verbosity: int) -> int:
    if verbosity < 0:
        return logging.ERROR
    return logging.DEBUG if verbosity >= 4 else logging.INFO
