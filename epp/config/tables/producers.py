"""Types of data producers."""

from typing import ClassVar, Final

from epp.config.spec import (
    BuildContext,
    Kind,
    KnownType,
    Parameters,
    PluginSpec,
    Stability,
    TokenEstimateSpec,
)
from epp.kvcache.approximate import ApproximateParams, ApproximatePrefixProducer
from epp.scheduling.records import PREFIX_MATCH
from epp.scheduling.scorers import DEFAULT_PREFIX_PRODUCER


class EstimateParams(Parameters, frozen=True):
    """How tokens are estimated: four bytes each, without anything to set."""

    later: ClassVar[tuple[str, ...]] = ("image", "video")


class TokenProducerParams(Parameters, frozen=True):
    """Parameters of `token-producer`: tokens are estimated."""

    later: ClassVar[tuple[str, ...]] = ("modelName", "vllm", "udsTokenizerConfig")
    estimate: EstimateParams = EstimateParams()


def _approximate(context: BuildContext, params: ApproximateParams) -> ApproximatePrefixProducer:
    return ApproximatePrefixProducer(context.name, params, context.view, context.secret)


def _tokens(context: BuildContext, params: TokenProducerParams) -> TokenEstimateSpec:
    return TokenEstimateSpec()


_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec(
        DEFAULT_PREFIX_PRODUCER, Kind.PRODUCER, ApproximateParams, _approximate, _S, provides=(PREFIX_MATCH,)
    ),
    PluginSpec("token-producer", Kind.PRODUCER, TokenProducerParams, _tokens, _S),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("tokenizer", Kind.PRODUCER, "token-producer"),
    KnownType("precise-prefix-cache-producer", Kind.PRODUCER),
    KnownType("burst-prefix-cache-producer", Kind.PRODUCER),
    KnownType("inflight-load-producer", Kind.PRODUCER),
    KnownType("predicted-latency-producer", Kind.PRODUCER),
    KnownType("mm-embeddings-cache-producer", Kind.PRODUCER),
    KnownType("p2p-source-producer", Kind.PRODUCER),
    KnownType("session-id-producer", Kind.PRODUCER),
    KnownType("multicluster-approx-prefix-cache-producer", Kind.PRODUCER),
)
