"""From what a data source fetched to what the pool knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from epp import names
from epp.errors import PageError
from epp.pool.engines import EngineSpec
from epp.pool.metrics_page import EngineGuess, EngineSample, PageReader, SeriesReader
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore

MOST_MODELS: Final = 4096
GPU_UTILIZATION: Final = "GPUUtilization"
_GPU_UTIL_SERIES: Final = "DCGM_FI_DEV_GPU_UTIL"


@dataclass(frozen=True, slots=True)
class Extracted:
    """How one page was understood.

    Attributes:
        failed: something the extractor is there for could not be read.
        remark: what an operator should hear of; empty where all is as it should be.
    """

    failed: bool = False
    remark: str = ""


_AS_IT_SHOULD_BE: Final = Extracted()

Learn = Callable[[int, EngineSample, float], None]


class EnginePages:
    """Reads metrics pages by the engine that the endpoint's label names.

    Without a label, and with one that names no known engine, the page is one of `default_engine`. Where it is
    not, because it has no load metric of that engine but of another known one, it is read as that one's, and
    the remark says so. A label that names a known engine is believed.

    `learn` is told every sample: `PoolStore.sampled` or `PoolStore.learned`.
    """

    def __init__(
        self, engines: Sequence[EngineSpec], default_engine: str, label_keys: Sequence[str], learn: Learn
    ) -> None:
        self._readers = {engine.name: PageReader(engine) for engine in engines}
        self._default = self._readers[default_engine]
        self._label_keys = tuple(label_keys)
        self._guess = EngineGuess(engines)
        self._learn = learn

    def path_of(self, endpoint: Endpoint) -> str | None:
        """Where the endpoint's engine serves its page; None = at the usual place."""
        label = self._label(endpoint)
        return self._readers.get(label, self._default).engine.path

    def extract(self, slot: int, endpoint: Endpoint, page: bytes, now: float) -> Extracted:
        """Raises PageError when this is no metrics page."""
        label = self._label(endpoint)
        labelled = self._readers.get(label)
        reader = labelled or self._default
        try:
            sample = reader.read(page)
        except PageError:
            if self._guess.engine_of(page) is None:
                raise
            sample = EngineSample()  # lines of another engine without any comment
        remarks = []
        if label and labelled is None:
            remarks.append(f"its label names engine {label}, which is none of {', '.join(self._readers)}")
        if not sample.tells_load and not sample.counters:
            guessed = self._guess.engine_of(page)
            if guessed is not None and guessed != reader.engine.name:
                remarks.append(
                    f"the page is one of engine {guessed}, not {reader.engine.name}; "
                    f"label the endpoint {self._label_keys[0]}: {guessed}"
                )
                if labelled is None:
                    reader = self._readers[guessed]
                    sample = reader.read(page)
        self._learn(slot, sample, now)
        untold = reader.untold(sample)
        if untold:
            remarks.append(f"the page lacks {', '.join(untold)}")
        remarks.extend(f"{name} is a counter and tells nothing of now" for name in sample.counters)
        return Extracted(bool(untold), "; ".join(remarks)) if remarks else _AS_IT_SHOULD_BE

    def _label(self, endpoint: Endpoint) -> str:
        for key in self._label_keys:
            if label := endpoint.labels.get(key):
                return label
        return ""


def engine_label_keys(configured: str) -> tuple[str, ...]:
    """The configured label, then the older one of the field, which still counts."""
    return tuple(dict.fromkeys((configured, names.ENGINE_LABELS[1])))


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1)]


class _Models(msgspec.Struct):
    data: list[_Model]


class ModelLists:
    """Reads the engines' `/v1/models`: base models and LoRA adapters alike, by id."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._decoder = msgspec.json.Decoder(_Models)

    def path_of(self, endpoint: Endpoint) -> str | None:
        return None

    def extract(self, slot: int, endpoint: Endpoint, page: bytes, now: float) -> Extracted:
        """Raises PageError when this is no list of models."""
        try:
            models = self._decoder.decode(page).data
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PageError(f"not a list of models: {error}") from None
        if len(models) > MOST_MODELS:
            raise PageError(f"a list of {len(models)} models; at most {MOST_MODELS} are read")
        self._store.listed_models(slot, frozenset(model.id for model in models))
        return _AS_IT_SHOULD_BE


class GpuPages:
    """Reads the pages of NVIDIA's DCGM exporter: how busy the busiest GPU of an endpoint's pod is.

    The attribute `GPU_UTILIZATION` becomes max(0, DCGM_FI_DEV_GPU_UTIL) / 100 over the series whose label
    `pod` is the endpoint's pod, and those without such a label. Every series counts where the pod is unknown.
    While a page tells nothing of the pod, the last value stays.

    The formula is the field's, with its defects. Without pod labels all GPUs of a page count for every
    endpoint that reads it: on the page of a node, those of other pods too. The label `namespace` is not
    looked at, so pods of one name on one node are taken for one. What is no number (NaN) counts 0.
    """

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._reader = SeriesReader(_GPU_UTIL_SERIES, "pod")

    def path_of(self, endpoint: Endpoint) -> str | None:
        return None

    def extract(self, slot: int, endpoint: Endpoint, page: bytes, now: float) -> Extracted:
        """Raises PageError when this is no metrics page."""
        series = self._reader.read(page)
        if not series:
            return Extracted(True, f'metric "{_GPU_UTIL_SERIES}" not found in DCGM response')
        busiest, found = 0.0, False
        for pod, percent in series:
            if pod is None or pod == endpoint.pod or not endpoint.pod:
                found = True
                busiest = percent if percent > busiest else busiest
        if not found:
            text = f'metric "{_GPU_UTIL_SERIES}" present but has no samples for pod "{endpoint.pod}"'
            return Extracted(True, text)
        self._store.learned(slot, EngineSample(attributes={GPU_UTILIZATION: busiest / 100.0}), now)
        return _AS_IT_SHOULD_BE
