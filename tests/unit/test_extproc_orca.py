"""Load reports in headers: the bytes of a real vLLM, the other forms, and what is none."""

import base64
import math
import random
from typing import Any

import pytest

from epp import names
from epp.extproc import orca
from epp.extproc.heads import read_answer_head
from epp.extproc.orca import read_load
from epp.pool.records import LoadReport
from epp.wire.orca_pb2 import OrcaLoadReport

HEADER, BINARY = names.ENDPOINT_LOAD_METRICS, names.ENDPOINT_LOAD_METRICS_BIN
# As vLLM 0.32.0 has sent them.
VLLM_JSON = b'JSON {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}}'
VLLM_TEXT = b"TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"


@pytest.mark.parametrize("header", [VLLM_JSON, VLLM_TEXT])
def test_vllm(header: bytes) -> None:
    assert read_load(HEADER, header) == LoadReport(waiting=0.0, kv_usage=0.0)


def test_triton() -> None:
    header = b"TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=4096"
    wanted = LoadReport(kv_usage=0.25, attributes={"named_metrics.max_token_capacity": 4096.0})
    assert read_load(HEADER, header) == wanted


FIGURES = {
    "cpu_utilization": 0.5,
    "rps_fractional": 12.5,
    "named_metrics.num_requests_running": 4.0,
    "named_metrics.num_requests_waiting": 7.0,
    "utilization.gpu": 0.75,
    "request_cost.tokens": 100.0,
}


def _binary() -> bytes:
    report = OrcaLoadReport(cpu_utilization=0.5, rps_fractional=12.5)
    report.named_metrics.update(num_requests_running=4.0, num_requests_waiting=7.0)
    report.utilization["gpu"] = 0.75
    report.request_cost["tokens"] = 100.0
    return base64.b64encode(report.SerializeToString())


IN_JSON = (
    b'JSON {"cpu_utilization": 0.5, "rps_fractional": 12.5, "utilization": {"gpu": 0.75}, '
    b'"request_cost": {"tokens": 100}, '
    b'"named_metrics": {"num_requests_running": 4, "num_requests_waiting": 7}}'
)
FORMS = [
    (HEADER, b"TEXT " + ", ".join(f"{key}={figure}" for key, figure in FIGURES.items()).encode()),
    (HEADER, b"text " + ",".join(f"{key}={figure}" for key, figure in FIGURES.items()).encode()),
    (HEADER, IN_JSON),
    (HEADER, b"BIN " + _binary()),
    (BINARY, _binary()),
    (BINARY, _binary().rstrip(b"=")),
]


@pytest.mark.parametrize(("name", "value"), FORMS)
def test_every_form_says_the_same(name: str, value: bytes) -> None:
    assert read_load(name, value) == LoadReport(
        waiting=7.0,
        running=4.0,
        attributes={key: figure for key, figure in FIGURES.items() if "num_requests" not in key},
    )


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"TEXT",
        b"TEXT ",
        b"TEXT a",
        b"TEXT a=b",
        b"TEXT \xff=1",
        b"cpu_utilization=0.3",
        b"JSON",
        b"JSON []",
        b"JSON {",
        b"JSON 1",
        b'JSON {"a": 1' + b"0" * 400 + b"}",
        b"JSON " + b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"BIN ****",
        b"BIN " + base64.b64encode(b"\xff\xff"),
        b"TEXT a=nan, b=inf",
        b"TEXT " + b"a=1, " * 5000 + b"a=1",
    ],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_no_report_is_none(value: bytes) -> None:
    assert read_load(HEADER, value) is None


def test_members_of_other_types_are_passed_over() -> None:
    value = b'JSON {"a": "1", "b": [1], "c": null, "d": {"x": {"y": 1}, "z": 2}, "cpu_utilization": 1}'
    assert read_load(HEADER, value) == LoadReport(attributes={"d.z": 2.0, "cpu_utilization": 1.0})


def test_no_load_is_below_zero() -> None:
    assert read_load(HEADER, b"TEXT named_metrics.num_requests_waiting=-1, cpu_utilization=1") == LoadReport(
        attributes={"cpu_utilization": 1.0}
    )


def test_no_more_figures_than_a_report_may_have() -> None:
    report = read_load(HEADER, b"TEXT " + b", ".join(b"f%d=1" % number for number in range(1000)))
    assert report is not None
    assert len(report.attributes) == orca.FIGURES


def test_no_bytes_raise() -> None:
    draw = random.Random(3)
    seeds = [value for _, value in FORMS]
    for _ in range(3000):
        value = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 6)):
            value[draw.randrange(len(value))] = draw.randrange(256)
        report = read_load(draw.choice((HEADER, BINARY)), bytes(value))
        figures = [] if report is None else [*report.attributes.values()]
        assert all(map(math.isfinite, figures))


def test_an_answer_without_the_header_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("epp.extproc.heads.read_load", never)
    head = read_answer_head(((":status", b"200"), ("content-type", b"application/json")))
    assert head.load is None


def test_a_header_that_is_none_does_not_hide_one_that_is() -> None:
    both = ((HEADER, VLLM_JSON), (BINARY, b"****"))
    assert read_answer_head(both).load == read_answer_head(both[::-1]).load == read_load(HEADER, VLLM_JSON)


# -- faults that these tests must see ------------------------------------------------------------------


def _all_forms() -> None:
    for form in FORMS:
        test_every_form_says_the_same(*form)
    test_vllm(VLLM_JSON)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WAITING", ("named_metrics.num_requests_running",)),
        ("KV_USAGE", ()),
        ("RUNNING", ("cpu_utilization",)),
    ],
)
def test_a_wrong_name_is_seen(name: str, value: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orca, name, value)
    with pytest.raises(AssertionError):
        _all_forms()
