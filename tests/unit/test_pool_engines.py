"""Metrics as users write them, and choosing the reader of an endpoint's page."""

from pathlib import Path

import pytest

from epp.errors import PageError
from epp.pool.engines import ENGINES, VLLM, CustomMetric, EngineSpec, MetricSpec
from epp.pool.extract import MOST_MODELS, EnginePages, ModelLists, engine_label_keys
from epp.pool.metrics_page import NO_LORA, EngineSample, LoraSample, PageReader
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore

DATA = Path(__file__).parent.parent / "data" / "pool"
SGLANG_PAGE = (DATA / "sglang-0.5.10.txt").read_bytes()
VLLM_PAGE = (DATA / "vllm-0.32-under-load.txt").read_bytes()
LABEL, OLD_LABEL = "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"


@pytest.mark.parametrize(
    ("text", "name", "labels"),
    [
        ("m", "m", ()),
        (" vllm:num_requests_waiting ", "vllm:num_requests_waiting", ()),
        ("m{}", "m", ()),
        ("m{ }", "m", ()),
        ("m{a=b}", "m", (("a", "b"),)),
        ('m{a="b"}', "m", (("a", "b"),)),
        ("m{a='b c'}", "m", (("a", "b c"),)),
        ('m { a = "b" , c=d-1.5/x , }', "m", (("a", "b"), ("c", "d-1.5/x"))),
        (r'm{a="say \"}, b=\" \\ \n",e=""}', "m", (("a", 'say "}, b=" \\ \n'), ("e", ""))),
    ],
)
def test_a_metric_by_name_and_labels(text: str, name: str, labels: tuple[tuple[str, str], ...]) -> None:
    spec = MetricSpec.parse(text)
    assert (spec.name, spec.labels) == (name, labels)


@pytest.mark.parametrize(
    "text",
    ["", " ", "1m", "m{", "m}", "m{a}", "m{a=}", "m{=b}", "m{a=b c=d}", 'm{a="b}', "m{a!=b}", "m{a=~b}"]
    + ["m{a=b,,c=d}", "rate(m[1m])", "m + n", "m-n", "é", "m{a=b} x"],
)
def test_what_is_no_metric_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write name or name\\{label=value"):
        MetricSpec.parse(text)


# -- adapters -----------------------------------------------------------------------------------------


def lora(*lines: str) -> LoraSample | None:
    return PageReader(VLLM).read(("# HELP x y\n" + "\n".join(lines) + "\n").encode()).lora


def info(value: str, running: str = "", waiting: str = "", most: str = "4") -> str:
    labels = f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}"


def test_the_series_written_last_tells_the_adapters() -> None:
    older, newer = info("1.5e9", "a"), info("1.6e9", "b, c,,b", "d")
    expected = LoraSample(frozenset("bc"), frozenset("d"), 4)
    assert lora(older, newer) == lora(newer, older) == expected
    assert lora(newer, info("NaN", "x"), info("+Inf", "y"), info("-1", "z")) == expected
    assert lora(info("1", "x", most="many")) == LoraSample(frozenset("x"), most=0)
    assert lora(info("1", r"a\"b")) == LoraSample(frozenset(['a"b']), most=4)


def test_no_series_is_no_adapters_and_no_trouble() -> None:
    assert lora() == NO_LORA
    assert lora(info("NaN", "x")) == NO_LORA
    reader = PageReader(VLLM)
    page = b"vllm:num_requests_waiting 1\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0\n"
    assert reader.untold(reader.read(page)) == ()


def test_an_engine_without_such_a_series_tells_nothing_of_adapters() -> None:
    assert PageReader(ENGINES[1]).read(SGLANG_PAGE).lora is None


# -- custom metrics -----------------------------------------------------------------------------------


def test_custom_metrics_are_summed_whatever_their_type_and_sign() -> None:
    engine = EngineSpec(
        "mine",
        running=(MetricSpec("done"),),
        custom=(
            CustomMetric("depth", MetricSpec.parse("depth{tier=gold}")),
            CustomMetric("done", MetricSpec("done")),
            CustomMetric("heat", MetricSpec("heat")),
            CustomMetric("rare", MetricSpec("rare"), optional=True),
        ),
    )
    reader = PageReader(engine)
    sample = reader.read(
        b'depth{tier="gold",rank="0"} 2\ndepth{tier="gold",rank="1"} 3\ndepth{tier="iron"} 9\n'
        b"# TYPE done counter\ndone 7\nheat -1.5\n"
    )
    assert sample.attributes == {"depth": 5.0, "done": 7.0, "heat": -1.5}
    assert sample.running is None
    assert reader.untold(sample) == ()
    poor = reader.read(b'heat NaN\ndepth{tier="iron"} 9\n')
    assert poor.attributes == {}
    assert reader.untold(poor) == ("done", "depth{tier=gold}", "done", "heat")


# -- which engine -------------------------------------------------------------------------------------


class Learnt:
    def __init__(self) -> None:
        self.sample = EngineSample()

    def __call__(self, slot: int, sample: EngineSample, now: float) -> None:
        self.sample = sample


def endpoint(**labels: str) -> Endpoint:
    keys = {"engine": LABEL, "old": OLD_LABEL, "mine": "my/engine"}
    return Endpoint("u", "n", "d", "10.0.0.1", 8000, {keys[key]: value for key, value in labels.items()})


def extract(
    page: bytes, labels: dict[str, str], key: str = LABEL, default: str = "vllm"
) -> tuple[float | None, str]:
    learnt = Learnt()
    pages = EnginePages(ENGINES, default, engine_label_keys(key), learnt)
    remark = pages.extract(0, endpoint(**labels), page, 1.0).remark
    return learnt.sample.waiting, remark


def test_the_label_chooses_the_engine() -> None:
    assert extract(SGLANG_PAGE, {"engine": "sglang"}) == (2826.0, "")
    assert extract(SGLANG_PAGE, {"old": "sglang"}) == (2826.0, "")
    assert extract(SGLANG_PAGE, {"engine": "sglang", "old": "vllm"}) == (2826.0, "")
    assert extract(SGLANG_PAGE, {"engine": "", "old": "sglang"}) == (2826.0, "")
    assert extract(SGLANG_PAGE, {"mine": "sglang", "engine": "vllm"}, key="my/engine") == (2826.0, "")
    assert extract(SGLANG_PAGE, {}, default="sglang") == (2826.0, "")
    assert extract(VLLM_PAGE, {}) == (8.0, "")


def test_without_a_label_the_page_tells_its_engine_and_it_is_said() -> None:
    waiting, remark = extract(SGLANG_PAGE, {})
    assert waiting == 2826.0
    assert remark == f"the page is one of engine sglang, not vllm; label the endpoint {LABEL}: sglang"


def test_a_label_is_believed_against_the_page_and_it_is_said() -> None:
    waiting, remark = extract(SGLANG_PAGE, {"engine": "vllm"})
    assert waiting is None
    assert "the page is one of engine sglang, not vllm" in remark
    assert "the page lacks vllm:num_requests_waiting" in remark


def test_a_label_that_names_nobody_is_no_label_and_it_is_said() -> None:
    waiting, remark = extract(SGLANG_PAGE, {"engine": "slang"})
    assert waiting == 2826.0
    assert "its label names engine slang, which is none of vllm, sglang" in remark
    assert extract(VLLM_PAGE, {"engine": "nope"})[0] == 8.0


def test_a_counter_is_said_and_is_no_failure() -> None:
    learnt = Learnt()
    pages = EnginePages(ENGINES, "triton", engine_label_keys(LABEL), learnt)
    extracted = pages.extract(0, endpoint(), (DATA / "triton.txt").read_bytes(), 1.0)
    assert extracted.remark == "nv_inference_exec_count is a counter and tells nothing of now"
    assert not extracted.failed


def test_each_engine_has_its_path() -> None:
    pages = EnginePages(ENGINES, "vllm", engine_label_keys(LABEL), Learnt())
    assert pages.path_of(endpoint()) is None
    assert pages.path_of(endpoint(engine="trtllm-serve")) == "/prometheus/metrics"


def test_a_list_of_iterations_is_no_page() -> None:
    with pytest.raises(PageError, match="not a metrics page"):
        extract(b"[]", {"engine": "trtllm-serve"})


# -- models -------------------------------------------------------------------------------------------


def store_of_one() -> PoolStore:
    store = PoolStore()
    store.sync([endpoint()], 0.0)
    return store


def test_models_and_adapters_are_listed_by_id() -> None:
    store = store_of_one()
    lists = ModelLists(store)
    lists.extract(
        0,
        endpoint(),
        b'{"object":"list","data":[{"id":"base","max_model_len":9},{"id":"sql","parent":"base"}]}',
        1.0,
    )
    assert {name: mask[0] for name, mask in store.view.models.items()} == {"base": True, "sql": True}
    lists.extract(0, endpoint(), b'{"data":[{"id":"base"}]}', 2.0)
    assert list(store.view.models) == ["base"]


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data":{}}',
        b'{"data":[{"name":"x"}]}',
        b'{"data":[{"id":""}]}',
        b'{"data":[{"id":1}]}',
    ]
    + [b"\xff", b"<html>", b'{"data":[{"id":"\xff"}]}', b"[" * 100_000, b'{"data":' + b"[" * 100_000],
)
def test_what_is_no_list_of_models(page: bytes) -> None:
    with pytest.raises(PageError, match="not a list of models"):
        ModelLists(store_of_one()).extract(0, endpoint(), page, 1.0)


def test_a_list_without_end_is_refused() -> None:
    page = b'{"data":[%s]}' % b",".join(b'{"id":"m%d"}' % n for n in range(MOST_MODELS + 1))
    store = store_of_one()
    with pytest.raises(PageError, match="at most 4096 are read"):
        ModelLists(store).extract(0, endpoint(), page, 1.0)
    assert store.view.models == {}


def test_hostile_labels_take_no_long_time_to_refuse() -> None:
    reader = PageReader(ENGINES[3])
    for labels in (
        b'{request_type="' + b'\\"' * 100_000,
        b"{" + b'request_type="x",' * 50_000,
        b"{" * 100_000,
    ):
        assert reader.read(b"# HELP x y\nnv_trt_llm_request_metrics" + labels + b"\n").waiting is None
