"""Reference configurations pick as their formulas say: every total is worked out by hand beside it."""

from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epp.kvcache.burst import BurstNeed
from epp.payload.records import RawRequest
from epp.pool.extract import GpuPages
from epp.pool.metrics_page import EngineSample
from tests.data.compat.line import Line, P, Stream

DATA = Path(__file__).parents[1] / "data" / "config"
A, B = (letter * 1024 for letter in "ab")
"""Prompts of four blocks of 64 tokens, four bytes each."""


def line(name: str, *pods: P) -> Line:
    config = (DATA / f"{name}.yaml").read_text()
    return Line(*pods, config=config, sample=EngineSample(block_size=64, cache_tokens=64_000))


def prompt(text: str) -> bytes:
    return b'{"model":"m","prompt":"%b"}' % text.encode()


def totals(picker: Line) -> list[float]:
    """Of the last decision, by endpoint; NaN for those that filters took out."""
    (leg,) = picker.recorder.decisions[-1].legs
    return leg.decision.total[: len(picker.store.roster)].tolist()  # type: ignore[no-any-return]


def ask(picker: Line, *body: bytes, **request: Any) -> Stream:
    stream = picker.ask(*body, **request)
    assert stream.destination is not None, stream.replies
    return stream


def test_default() -> None:
    """2 x (8 - q) / (8 - 0) + 2 x (1 - kv) + 3 x matched / 4."""
    picker = line("default-with-file-discovery", P(0, 0.5), P(8, 0.1), P(2, 0.3))
    cold = ask(picker, prompt(A))
    assert totals(picker) == pytest.approx([2 + 1.0, 0 + 1.8, 1.5 + 1.4])
    assert cold.pod == 0
    assert ask(picker, prompt(B), subset=["192.168.1.2:8000"]).pod == 1
    warm = ask(picker, prompt(B))
    assert totals(picker) == pytest.approx([3.0, 1.8 + 3, 2.9])
    assert warm.pod == 1


def test_optimized_baseline() -> None:
    """As the default, and 2 x (1 - rank) by least recent use where nobody holds the prompt, else 2 x 0.5."""
    picker = line("optimized-baseline", P(0, 0.5), P(4, 0.9))
    assert ask(picker, prompt(A)).pod == 0
    cold = ask(picker, prompt(B))
    assert totals(picker) == pytest.approx([2 + 1.0 + 0 + 0, 0 + 0.2 + 0 + 2])
    assert cold.pod == 0
    warm = ask(picker, prompt(A))
    assert totals(picker) == pytest.approx([2 + 1.0 + 3 + 1, 0 + 0.2 + 0 + 1])
    assert warm.pod == 0


def test_tiered_prefix_cache_cpu() -> None:
    """2 x queue + 2 x kv + 1 x matched / 4 in each of two caches; the smaller one holds 1000 blocks of 16."""
    picker = line("tiered-prefix-cache-cpu", P(1, 0.0), P(0, 0.3))
    assert ask(picker, prompt(A), subset=["192.168.1.1:8000"]).pod == 0
    ask(picker, prompt(A))
    assert totals(picker) == pytest.approx([0 + 2.0 + 1 + 1, 2 + 1.4 + 0 + 0])


def test_burst() -> None:
    """2 x the place in the window + 1 x 0.5 x (1 - q / 128); the first of equals for the first of a pair."""
    picker = line("burst", P(64), P(0))
    raws = [RawRequest("id", "POST", "/v1/completions", (), prompt(text)) for text in (A, A, B)]
    waiting = [picker.director.prepare(raw, picker.now) for raw in raws]
    needs = [need for one in waiting for need in one.needs if isinstance(need, BurstNeed)]
    windows = [need.producer.enter(need.held)[0] for need in needs]
    list(needs[0].producer.settle(windows[0]))
    found = []
    for one, need in zip(waiting, needs, strict=True):
        picker.director.submit(picker.director.satisfied(one, [need.held.place]), picker.now)
        found.append(totals(picker))
    assert found == [[2 + 0.25, 0.5], [2 + 0.25, 0.5], [0.25, 0.5]]


def test_payload_agnostic() -> None:
    """1 x active requests (none: 1, the most: 0) + 1 x the session's endpoint; no body is read."""
    picker = line("payload-agnostic", P(), P())
    first = ask(picker, b"\x00 no JSON")
    assert totals(picker) == [1.0, 1.0]
    first.answer(b"ok")
    token = dict(first.answer_head["set"])["x-session-token"]
    assert b64decode(token).decode() == f"default/pod-{first.destination}"
    # Ended, so both are idle again: only the session tells them apart.
    pinned = ask(picker, b"\x00", headers={"x-session-token": token})
    expected = [1.0, 1.0]
    expected[first.pod] += 1.0
    assert totals(picker) == expected
    assert pinned.pod == first.pod
    # That one is busy now: a new session goes elsewhere, the old one is worth a tie.
    assert ask(picker, b"\x00").pod != first.pod
    assert sorted(totals(picker)) == [0.0, 1.0]


def test_data_parallel() -> None:
    """The idle rank is chosen; the proxy is sent to the primary port, the rank's port stands in a header."""
    role = {"llm-d.ai/role": "decode"}
    picker = line(
        "data-parallel",
        P(3, host_port="10.0.0.1:8000", labels=role),
        P(1, host_port="10.0.0.1:8001", labels=role),
        P(0, host_port="10.0.0.2:8000", labels={"llm-d.ai/role": "prefill"}),
    )
    stream = ask(picker, prompt(A))
    np.testing.assert_array_equal(totals(picker), [0.0, 1.0, np.nan])
    assert stream.destination == "10.0.0.1:8000"
    assert dict(stream.head["set"])["x-data-parallel-host-port"] == "10.0.0.1:8001"


def test_decode_only() -> None:
    """Endpoints of the other roles are out; one without a role serves both."""
    roles = ("prefill", "decode", "", "encode")
    pods = [P(n, labels={"llm-d.ai/role": role} if role else {}) for n, role in enumerate(roles)]
    picker = line("decode-only", *pods)
    assert ask(picker, prompt(A)).pod == 1
    np.testing.assert_array_equal(totals(picker), [np.nan, 1.0, 0.0, np.nan])


def test_multimodal() -> None:
    """2 x queue + 2 x kv + 3 x prefix + 1 x matched media / all media."""
    picker = line("multimodal", P(0, 0.0), P(0, 0.0))
    image = b'{"type":"image_url","image_url":{"url":"http://x/%d.png"}}'
    body = b'{"model":"m","messages":[{"role":"user","content":[%b,%b]}]}'
    one = ask(picker, body % (image % 1, image % 2), path="/v1/chat/completions").pod
    prefix_of_both = totals(picker)
    assert prefix_of_both == [4.0, 4.0]
    ask(picker, body % (image % 2, image % 3), path="/v1/chat/completions")
    expected = [4.0, 4.0]
    expected[one] += 0.5
    assert totals(picker) == pytest.approx(expected)


def test_gpu_utilization() -> None:
    """Above 0.9 an endpoint is out; 2 x (1 - the busiest GPU) + 1 x (1 - kv); 0 for a GPU nobody told of."""
    picker = line("gpu-utilization", P(kv_usage=0.5), P(kv_usage=0.1), P(kv_usage=0.0), P(kv_usage=0.2))
    picker.store.add_attributes(picker.assembly.attributes)
    reader = GpuPages(picker.store)

    def told(*pages: tuple[int, ...]) -> None:
        for (slot, endpoint), percents in zip(picker.store.roster, pages, strict=False):
            lines = [f'DCGM_FI_DEV_GPU_UTIL{{gpu="{n}"}} {percent}\n' for n, percent in enumerate(percents)]
            reader.extract(slot, endpoint, "".join(lines).encode(), picker.now)

    told((30, 40), (90,), (91, 0))
    assert ask(picker, prompt(A)).pod == 0
    expected = [2 * 0.6 + 0.5, 2 * 0.1 + 0.9, np.nan, 0 + 0.8]
    np.testing.assert_allclose(totals(picker), expected)
    told((95,), (93,), (99,))
    assert ask(picker, prompt(A)).pod == 3, "the only one that may be idle"
    # All are busy: all stay, and the order is that of the figures.
    picker = line("gpu-utilization", P(), P())
    picker.store.add_attributes(picker.assembly.attributes)
    reader = GpuPages(picker.store)
    told((100,), (95,))
    assert ask(picker, prompt(A)).pod == 1
    np.testing.assert_allclose(totals(picker), [1.0, 2 * 0.05 + 1.0])


def test_probabilistic_admitter_lets_all_of_priority_0_pass() -> None:
    picker = line("probabilistic-admitter", P(100, 1.0), P(90, 1.0))
    assert ask(picker, prompt(A)).pod == 1
    assert totals(picker) == [0.0, 1.0]
