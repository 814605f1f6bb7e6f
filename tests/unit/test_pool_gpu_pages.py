"""Figures of GPUs from pages of the DCGM exporter: whose series count, and what the pool learns."""

import numpy as np
import pytest

from epp.errors import PageError
from epp.pool.extract import GPU_UTILIZATION, Extracted, GpuPages
from epp.pool.metrics_page import SeriesReader
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore

NAME = "DCGM_FI_DEV_GPU_UTIL"
HEADER = f"# HELP {NAME} GPU utilization (in %).\n# TYPE {NAME} gauge\n"


def page(*series: str) -> bytes:
    return (HEADER + "".join(f"{NAME}{each}\n" for each in series)).encode()


def extracted(content: bytes, pod: str = "vllm-0", before: float = np.nan) -> tuple[float, Extracted]:
    """The figure of an endpoint of `pod` after the page, and what is said of it."""
    store = PoolStore()
    store.add_attributes([GPU_UTILIZATION])
    endpoint = Endpoint("uid", "vllm-0-rank-0", "llm", "10.0.0.1", 8000, pod=pod)
    store.sync([endpoint], 0.0)
    store.view.attributes[GPU_UTILIZATION][0] = before
    result = GpuPages(store).extract(0, endpoint, content, 1.0)
    assert not store.view.present[0], "of the engine's load the page says nothing"
    return store.view.attributes[GPU_UTILIZATION].item(0), result


@pytest.mark.parametrize(
    ("series", "pod", "expected"),
    [
        ((" 73",), "vllm-0", 0.73),
        (('{gpu="0"} 73', '{gpu="1"} 81', '{gpu="2"} 65'), "vllm-0", 0.81),
        (('{pod="vllm-0"} 25', '{pod="vllm-1"} 80', '{pod="vllm-01"} 99'), "vllm-0", 0.25),
        (('{pod="vllm-1"} 99', '{gpu="1",pod="vllm-0"} 40', '{pod="vllm-0"} 70'), "vllm-0", 0.70),
        # No label counts for all, an empty one for nobody whose pod is known.
        (('{pod="vllm-0"} 10', '{gpu="1"} 60', '{pod=""} 90'), "vllm-0", 0.60),
        (('{pod="vllm-0"} 10', '{pod=""} 90'), "", 0.90),
        # The label of another name that ends alike is none.
        (('{exported_pod="vllm-1"} 33',), "vllm-0", 0.33),
        # One pod for the formula, two for Kubernetes.
        (('{namespace="a",pod="vllm-0"} 5', '{namespace="b",pod="vllm-0"} 50'), "vllm-0", 0.50),
        (('{pod="a\\"}b"} 7',), 'a"}b', 0.07),
        ((" 0",), "vllm-0", 0.0),
        ((" -5",), "vllm-0", 0.0),
        ((" NaN",), "vllm-0", 0.0),
        ((" 120",), "vllm-0", 1.2),
        (("\t41.5 1395066363000",), "vllm-0", 0.415),
    ],
)
def test_the_busiest_gpu_of_the_pod_counts(series: tuple[str, ...], pod: str, expected: float) -> None:
    figure, result = extracted(page(*series), pod)
    assert figure == pytest.approx(expected)
    assert result == Extracted()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (page(), f'metric "{NAME}" not found in DCGM response'),
        (b"# HELP up Up.\nup 1\n", f'metric "{NAME}" not found in DCGM response'),
        (
            b'# TYPE x gauge\nDCGM_FI_DEV_GPU_UTIL_AVG{pod="vllm-0"} 1\n',
            f'metric "{NAME}" not found in DCGM response',
        ),
        (
            page('{pod="other"} 50', '{pod=""} 1'),
            f'metric "{NAME}" present but has no samples for pod "vllm-0"',
        ),
    ],
)
def test_what_a_page_does_not_tell_keeps_its_value_and_is_said(content: bytes, says: str) -> None:
    assert extracted(content, before=0.5) == (0.5, Extracted(True, says))


@pytest.mark.parametrize("value", ["+Inf", "1e999"])
def test_an_infinite_value_is_not_learned(value: str) -> None:
    assert extracted(page(f" {value}"), before=0.5)[0] == 0.5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty page"),
        (b"<html>", "not a metrics page, it starts with b'<html>'"),
        (page(" x"), "is not a line of DCGM_FI_DEV_GPU_UTIL"),
        (page('{pod="vllm-0" 5'), "is not a line of DCGM_FI_DEV_GPU_UTIL"),
        (page('{pod="vllm-0"}'), "is not a line of DCGM_FI_DEV_GPU_UTIL"),
    ],
)
def test_what_is_no_page_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(PageError, match=says):
        extracted(content)


def test_a_series_has_its_label_as_it_is_meant() -> None:
    read = SeriesReader("a", "y").read
    lines = ('a{x="1",y="q\\"\\\\\\n"} 2', 'ab{y="z"} 3', "a 4\r", 'a{x="y=\\"z\\"",y=""} 5')
    content = "\n".join(("# TYPE a gauge", *lines, "")).encode()
    assert read(content) == read(content) == [('q"\\\n', 2.0), (None, 4.0), ("", 5.0)]
    assert read(b"a 1") == [(None, 1.0)], "a page without comments"
    long = b'a{x="%b",y="z"} 1' % (b"x" * 5000)
    assert read(long) == [("z", 1.0)]
