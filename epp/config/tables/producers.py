"""Types of data producers."""

from typing import ClassVar, Final
from urllib.parse import urlsplit

from epp.config.spec import (
    BuildContext,
    Kind,
    KnownType,
    Parameters,
    PluginSpec,
    Stability,
    TokenEstimateSpec,
)
from epp.durations import Duration
from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.kvcache.burst import BurstParams, BurstPrefixProducer
from epp.kvcache.embeddings import (
    DEFAULT_EMBEDDINGS_PRODUCER,
    EMBEDDINGS_MATCH,
    EmbeddingsCacheParams,
    EmbeddingsCacheProducer,
)
from epp.payload.estimate import Estimate
from epp.payload.render import ExactTokens
from epp.scheduling.filters import DEFAULT_INFLIGHT_PRODUCER
from epp.scheduling.inflight import InflightLoadParams, InflightLoadProducer
from epp.scheduling.kv_source import KvSource, KvSourceParams
from epp.scheduling.records import INFLIGHT_LOAD, PREFIX_MATCH, SESSION_ID
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER
from epp.scheduling.sessions import SessionIdProducer, SessionIdProducerParams


class VllmRenderParams(Parameters, frozen=True):
    """How prompts are rendered. `mm_timeout`: of those with media."""

    url: str = "http://localhost:8000"
    timeout: Duration = Duration(5.0)
    mm_timeout: Duration = Duration(30.0)

    def __post_init__(self) -> None:
        if not _is_base(self.url):
            raise ValueError(f"url {self.url!r} is not http://host:port, or the same with https or a path")
        for name, value in (("timeout", self.timeout), ("mmTimeout", self.mm_timeout)):
            if value <= 0:
                raise ValueError(f"{name} must be above 0")


def _is_base(url: str) -> bool:
    """Whether paths can be put at its end."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        return False


class TokenProducerParams(Parameters, frozen=True):
    """Parameters of `token-producer`: tokens are estimated; with a model name they are those of vLLM.

    Attributes:
        model_name: the base model that prompts are rendered for; empty = they are not.
    """

    later: ClassVar[tuple[str, ...]] = ("udsTokenizerConfig",)
    estimate: Estimate = Estimate()
    model_name: str = ""
    vllm: VllmRenderParams | None = None

    def __post_init__(self) -> None:
        if self.vllm is not None and not self.model_name:
            raise ValueError("vllm needs modelName, the model that prompts are rendered for")


def _approximate(context: BuildContext, params: ApproximateParams) -> ApproximatePrefixProducer:
    return ApproximatePrefixProducer(context.name, params, context.view, context.secret)


def _burst(context: BuildContext, params: BurstParams) -> BurstPrefixProducer:
    return BurstPrefixProducer(context.name, params, context.view, context.secret)


def _tokens(context: BuildContext, params: TokenProducerParams) -> TokenEstimateSpec:
    if not params.model_name:
        return TokenEstimateSpec(params.estimate)
    vllm = params.vllm or VllmRenderParams()
    exact = ExactTokens(vllm.url.rstrip("/"), params.model_name, vllm.timeout, vllm.mm_timeout)
    return TokenEstimateSpec(params.estimate, exact)


def _inflight(context: BuildContext, params: InflightLoadParams) -> InflightLoadProducer:
    return InflightLoadProducer(context.name, params, context.view)


def _embeddings(context: BuildContext, params: EmbeddingsCacheParams) -> EmbeddingsCacheProducer:
    return EmbeddingsCacheProducer(context.name, params, context.view)


def _kv_source(context: BuildContext, params: KvSourceParams) -> KvSource:
    return KvSource(params)


def _session_id(context: BuildContext, params: SessionIdProducerParams) -> SessionIdProducer:
    return SessionIdProducer(context.name, params)


_A: Final = Stability.ALPHA
_P: Final = Kind.PRODUCER
_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec(
        DEFAULT_PREFIX_PRODUCER,
        Kind.PRODUCER,
        ApproximateParams,
        _approximate,
        _S,
        provides=(PREFIX_MATCH,),
        state_parameters=("auto_tune", "block_size_tokens", "lru_capacity_per_server"),
    ),
    PluginSpec("token-producer", Kind.PRODUCER, TokenProducerParams, _tokens, _S),
    PluginSpec("tokenizer", Kind.PRODUCER, TokenProducerParams, _tokens, _S, replaced_by="token-producer"),
    PluginSpec(
        DEFAULT_INFLIGHT_PRODUCER,
        _P,
        InflightLoadParams,
        _inflight,
        _S,
        needs=InflightLoadParams.needs,
        provides=(INFLIGHT_LOAD,),
        state_parameters=(),
    ),
    PluginSpec(
        DEFAULT_EMBEDDINGS_PRODUCER,
        _P,
        EmbeddingsCacheParams,
        _embeddings,
        _S,
        provides=(EMBEDDINGS_MATCH,),
    ),
    PluginSpec("burst-prefix-cache-producer", _P, BurstParams, _burst, _A, provides=(PREFIX_MATCH,)),
    PluginSpec("p2p-source-producer", _P, KvSourceParams, _kv_source, _A, needs=KvSourceParams.needs),
    PluginSpec("session-id-producer", _P, SessionIdProducerParams, _session_id, _S, provides=(SESSION_ID,)),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("precise-prefix-cache-producer", Kind.PRODUCER),
    KnownType("predicted-latency-producer", Kind.PRODUCER),
    KnownType("multicluster-approx-prefix-cache-producer", Kind.PRODUCER),
)
