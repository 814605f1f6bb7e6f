"""The targets of the fuzzer without its guidance: a bounded number of inputs, and the seeds.

Planted faults show that the targets see what is wrong.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget
from epp.extproc.records import Effect, Event, Finish, RequestChunk
from epp.http2.connection import Connection
from epp.http2.fields import Field, FieldDecoder
from epp.http2.heads import HeadReader, RequestHead
from epp.http2.messages import MessageReader
from fuzz.draw import Draw
from fuzz.run import figures
from fuzz.targets import TARGETS

SEEDS = Path(__file__).resolve().parents[2] / "fuzz" / "corpus"
EXAMPLES = 150

# Small numbers are most of the choices that a target draws; the rest is what it takes as it is.
PIECES = st.binary(max_size=20) | st.lists(st.integers(0, 24), max_size=20).map(bytes)


def seeds(target: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((SEEDS / target).iterdir())]


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """Bytes, and parts of seeds with others between them."""
    parts = st.builds(
        lambda seed, start, size: seed[start : start + size],
        st.sampled_from(seeds(target)),
        st.integers(0, 40),
        st.integers(1, 200),
    )
    return st.lists(PIECES | parts, max_size=8).map(b"".join)


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(inputs(target))
    def attempt(data: bytes) -> None:
        TARGETS[target](data)

    attempt()


@pytest.mark.parametrize(
    "seed", sorted(SEEDS.glob("*/*")), ids=lambda file: f"{file.parent.name}-{file.name}"
)
def test_seeds(seed: Path) -> None:
    TARGETS[seed.parent.name](seed.read_bytes())


def test_every_target_has_seeds() -> None:
    assert {folder.name for folder in SEEDS.iterdir()} == set(TARGETS)


def test_draw_ends_with_first_choices() -> None:
    draw = Draw(b"\x05\x01\x00\x02ab")
    assert (draw.below(4), draw.below(1000), draw.block(), draw.left) == (1, 256, b"ab", 0)
    assert (draw.below(7), draw.flag(), draw.pick("xyz"), draw.take(3), draw.block()) == (
        0,
        False,
        "x",
        b"",
        b"",
    )


def test_the_runner_reads_what_the_fuzzer_says() -> None:
    said = "INFO: x\n#2\tINITED cov: 8 ft: 9 corp: 1/1b\n#64\tNEW    cov: 12 ft: 30 corp: 7/93b lim: 4\n"
    assert figures(said) == (64, 12, 7)
    assert figures(said + "Done 99 runs in 2 second(s)\nstat::number_of_executed_units: 99\n") == (99, 12, 7)
    assert figures("") == (0, 0, 0)


# -- planted faults -----------------------------------------------------------------------------------


class ForgetsToEndCalls(Connection):
    def lose(self) -> None:
        self.over = True


class LetsAnErrorOut(Connection):
    def receive(self, data: bytes, now: float) -> None:
        if b"\x08" in data[9:]:
            raise IndexError
        super().receive(data, now)


class AnswersTwice(Connection):
    def take(self) -> bytes:
        data = super().take()
        return data * 2 if data[3:4] == b"\x06" else data


class CutsFrames(Connection):
    def take(self) -> bytes:
        return super().take()[:-1]


class GoesOnAfterTheEnd(Connection):
    def receive(self, data: bytes, now: float) -> None:
        super().receive(data, now)
        if self.over:
            self.out.parts.append(b"\0\0\x08\x06\x01\0\0\0\0" + bytes(8))


class KeepsBytes(Connection):
    def receive(self, data: bytes, now: float) -> None:
        super().receive(data, now)
        if len(data) > 600:
            self.out.account.charge(1)


class IgnoresWindows(Connection):
    def receive(self, data: bytes, now: float) -> None:
        self.out.credit += 1 << 20
        super().receive(data, now)


class WritesMuch(Connection):
    def take(self) -> bytes:
        data = super().take()
        return data + data[:9] * 500 if data[3:4] == b"\x04" else data


class NeverInflates(MessageReader):
    def _inflate(self, body: bytes) -> bytes:
        return body


class TakesAnySize(MessageReader):
    def _size(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at + 1 : at + 5], "big")


class LosesPieces(MessageReader):
    def _keep(self, piece: bytes) -> None:
        super()._keep(piece)
        if self.held > 20:
            self._pieces[0] = self._pieces[0][1:]


class DropsFields(FieldDecoder):
    def decode(self, block: bytes) -> tuple[Field, ...]:
        return super().decode(block)[:8]


class IgnoresTheLimit(FieldDecoder):
    def __init__(self, list_bytes: int) -> None:
        super().__init__(list_bytes * 2)


class ForgetsTheTable(FieldDecoder):
    def decode(self, block: bytes) -> tuple[Field, ...]:
        fields = super().decode(block)
        self._table.maxsize = 0
        self._table.maxsize = 4096
        return fields


class JudgesByMemory(HeadReader):
    def _remember(self, fields: tuple[Field, ...], head: RequestHead) -> None:
        super()._remember(fields[:3], head)


class KeepsBodies(Exchange):
    def __init__(self, budget: BodyBudget, *rest: Any) -> None:
        super().__init__(budget, *rest)
        self.budget = budget

    def receive(self, event: Event) -> Any:
        if isinstance(event, RequestChunk):
            self.budget.take(1)
        return super().receive(event)


class NeverFinishes(Exchange):
    def receive(self, event: Event) -> list[Effect]:
        return [effect for effect in super().receive(event) if not isinstance(effect, Finish)]


class BreaksOnBodies(Exchange):
    def receive(self, event: Event) -> Any:
        if isinstance(event, RequestChunk) and event.end_of_stream:
            raise KeyError(event.at)
        return super().receive(event)


FAULTS: tuple[tuple[str, str, Any], ...] = (
    *((target, "make", fault) for target in ("frames", "raw") for fault in (CutsFrames, GoesOnAfterTheEnd)),
    *(("frames", "make", fault) for fault in (AnswersTwice, ForgetsToEndCalls, LetsAnErrorOut)),
    *(("frames", "make", fault) for fault in (KeepsBytes, IgnoresWindows, WritesMuch)),
    *(("messages", "make", fault) for fault in (NeverInflates, TakesAnySize, LosesPieces)),
    *(("headers", "decoder", fault) for fault in (DropsFields, IgnoresTheLimit, ForgetsTheTable)),
    ("headers", "reader", JudgesByMemory),
    *(("exchange", "make", fault) for fault in (KeepsBodies, NeverFinishes, BreaksOnBodies)),
)


@pytest.mark.parametrize(("target", "place", "fault"), FAULTS)
def test_targets_see(target: str, place: str, fault: Any) -> None:
    """By a seed, or at the latest by what is made of them."""
    broken: Callable[[bytes], None] = partial(TARGETS[target], **{place: fault})

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(inputs(target))
    def attempt(data: bytes) -> None:
        broken(data)

    def all_of_it() -> None:
        for seed in seeds(target):
            broken(seed)
        attempt()

    with pytest.raises((AssertionError, IndexError, KeyError)):
        all_of_it()
