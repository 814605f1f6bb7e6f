"""h2spec against the running picker, plain and over TLS (`make h2spec`).

    python tools/h2spec.py [--transport NAME] [SECTION]...

h2spec is built from the modules that `tools/h2spec/` pins. It plays clients that keep and that break the
rules of RFC 7540 and RFC 7541, and says what the server did. Ends with 1 where a case fails
that is not in `ALLOWED`.
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import click

from epp.lab.stack import HOST, Picker, StackError
from tools.go_programs import BuildError, built

PINS = Path(__file__).with_name("h2spec")
PACKAGE = "github.com/summerwind/h2spec/cmd/h2spec"
NOBODY = (HOST, 1)
CASES = 146
ANSWER_S = 20
WHOLE_RUN_S = 400
# One case opens as many streams as it may, and one more.
FLAGS = ("--max-concurrent-streams=100", "--drain-timeout=0s")

ALLOWED: dict[str, str] = {}
"""Cases that fail, by id (`http2/5.1.2/1`), each with the reason why that is right."""

_CLOSING = re.compile(r"^\d+ tests, \d+ passed, \d+ skipped, \d+ failed$", re.MULTILINE)
_SAID = re.compile(r"(<(error|failure)>)(.*?)(</\2>)", re.DOTALL)


class H2specError(Exception):
    """There is no report: h2spec could not be run to its end, or the picker not be reached."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        id: as h2spec takes it on its command line (`http2/5.1.2/1`).
        title: what it does.
        outcome: `passed`, `skipped` or `failed`.
        expected: what would have been right, one of these; empty unless it failed.
        actual: what came instead.
    """

    id: str
    title: str
    outcome: str
    expected: tuple[str, ...] = ()
    actual: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """`closing`: h2spec's own count of its cases."""

    cases: tuple[Case, ...]
    closing: str


def wrong(report: Report, allowed: dict[str, str]) -> list[str]:
    """What is not as it must be, a text each: cases that fail, and allowed ones that do not fail any more."""
    failed = {case.id: case for case in report.cases if case.outcome == "failed"}
    ran = {case.id for case in report.cases}
    return [
        *(
            f"{case.id}: {case.title}\n    expected: {' | '.join(case.expected)}\n    actual: {case.actual}"
            for case in failed.values()
            if case.id not in allowed
        ),
        *(f"{case}: allowed to fail, but does not" for case in allowed if case in ran - failed.keys()),
    ]


def read(report: str) -> tuple[Case, ...]:
    """The cases of a JUnit report of h2spec.

    Raises:
        ElementTree.ParseError: it is none.
    """
    cases = []
    # h2spec writes what it says of a failure as it is, markup or not.
    whole = _SAID.sub(lambda said: said[1] + escape(said[3]) + said[4], report)
    for suite in ElementTree.fromstring(whole).iter("testsuite"):
        for number, case in enumerate(suite.iter("testcase"), 1):
            cases.append(_case(f"{suite.get('package')}/{number}", case))
    return tuple(cases)


def _case(number: str, case: ElementTree.Element) -> Case:
    title = case.get("classname", "")
    if case.find("skipped") is not None:
        return Case(number, title, "skipped")
    for failure in (*case.iter("error"), *case.iter("failure")):
        *expected, actual = (failure.text or "").splitlines() or [""]
        return Case(number, title, "failed", tuple(expected), actual)
    return Case(number, title, "passed")


async def run(
    program: Path, port: int, *, tls: bool, sections: Sequence[str] = (), answer_s: int = ANSWER_S
) -> Report:
    """Run it against a server on loopback; without `sections`, all of its cases, the strict ones too.

    Args:
        answer_s: how long it waits for what must come; a case that waits in vain fails.

    Raises:
        H2specError: as it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        process = await asyncio.create_subprocess_exec(
            *(str(program), "--strict", "--host", HOST, "--port", str(port), "--timeout", str(answer_s)),
            *("--junit-report", str(file), *(["--tls", "--insecure"] if tls else []), *sections),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(WHOLE_RUN_S):
                output, _ = await process.communicate()
        except TimeoutError:
            raise H2specError(f"h2spec did not come to its end in {WHOLE_RUN_S} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        told = output.decode(errors="replace")
        closing = _CLOSING.search(told)
        if closing is None or not file.exists():
            raise H2specError(f"h2spec ended without a report:\n{told[-2000:]}")
        return Report(read(file.read_text(errors="replace")), closing[0])


async def against_picker(
    program: Path,
    folder: Path,
    transport: str,
    *,
    tls: bool,
    sections: Sequence[str] = (),
    answer_s: int = ANSWER_S,
) -> Report:
    """Against `warmroute serve` in a process of its own, whose files go to `folder`.

    Raises:
        H2specError: there is no report, or the picker did not live through it unharmed.
        StackError: the picker did not come up.
    """
    picker = Picker(folder, [NOBODY], tls=tls, flags=(f"--transport={transport}", *FLAGS))
    try:
        await picker.start()
        report = await run(program, picker.grpc_port, tls=tls, sections=sections, answer_s=answer_s)
        if picker.child.returncode is not None:
            raise H2specError(f"the picker ended:\n{picker.child.log_end()}")
    finally:
        await picker.child.stop()
    if "Traceback" in picker.child.log_path.read_text(errors="replace"):
        raise H2specError(f"the picker came to grief:\n{picker.child.log_end(60)}")
    return report


@click.command()
@click.option("--transport", default="own", show_default=True, help="Transport of the picker.")
@click.argument("sections", nargs=-1)
def main(transport: str, sections: tuple[str, ...]) -> None:
    """Run h2spec against the picker, plain and over TLS, or the given sections of it (`http2/6.9`)."""
    try:
        program = built(PINS, PACKAGE)
        complaints = []
        for tls in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                report = asyncio.run(
                    against_picker(program, Path(folder), transport, tls=tls, sections=sections)
                )
            found = wrong(report, ALLOWED)
            complaints += found
            print("\n".join([*found, f"{'TLS' if tls else 'plain'}: {report.closing}"]), flush=True)
    except (BuildError, H2specError, StackError) as error:
        sys.exit(f"h2spec: {error}")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
