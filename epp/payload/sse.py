"""Events of a `text/event-stream` body (WHATWG HTML, 9.2): where they end, and the data they carry."""

import re

# A blank line ends an event. More blank lines, or the second half of a CRLF, make events without data.
_BLANK_LINE = re.compile(rb"\n\n|\n\r\n|\r\r")
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_DATA_LINE = re.compile(rb"data:(?<![^\r\n]data:) ?([^\r\n]*+)")

LONGEST_BLANK_LINE = 3
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
USUAL_ENDS = (b"\n\n", b"\r\n\r\n")
DONE = b"[DONE]"

# Numbers: a byte is found and compared faster so than as a byte string of length one.
LINE_FEED = 10
CARRIAGE_RETURN = 13
END_OF_OBJECT = ord("}")


def last_end(text: bytes | bytearray, start: int = 0) -> int:
    """Where the last whole event ends; 0 if no blank line stands at or after `start`."""
    end = 0
    for blank_line in _BLANK_LINES:
        found = text.rfind(blank_line, start)
        if found >= 0:
            end = max(end, found + len(blank_line))
    return end


def events(text: bytes) -> list[bytes]:
    """The events of `text`, each with its blank line; what stands after the last blank line comes last."""
    if text.find(b"\n\n") == len(text) - 2 and CARRIAGE_RETURN not in text:
        return [text]
    ends = [blank.end() for blank in _BLANK_LINE.finditer(text)]
    found = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    rest = text[ends[-1] :] if ends else text
    return [*found, rest] if rest else found


def data_lines(event: bytes) -> list[tuple[int, int]]:
    """First byte and end of the content of each data line."""
    return [line.span(1) for line in _DATA_LINE.finditer(event)]


def data(event: bytes) -> bytes:
    """The data of an event, its lines joined as the standard says; empty if it has none."""
    if event[:6] == b"data: " and event.find(b"\n") == len(event) - 2 and CARRIAGE_RETURN not in event:
        return event[6:-2]
    return b"\n".join(_DATA_LINE.findall(event))


def data_line_count(text: bytes) -> int:
    """How many data lines stand in whole events; the `[DONE]` that ends a stream of OpenAI is none."""
    if text[-3:] == b"}\n\n" and text.find(b"\n") == len(text) - 2 and CARRIAGE_RETURN not in text:
        return int(text.startswith(b"data:"))
    if text.find(DONE) >= 0:
        return sum(line.strip() != DONE for line in _DATA_LINE.findall(text))
    if CARRIAGE_RETURN in text:
        text = text.replace(b"\r", b"\n")
    return text.count(b"\ndata:") + text.startswith(b"data:")
