"""Types of pickers, profile handlers and deciders."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.scheduling.handlers import (
    DataParallelProfileHandler,
    DataParallelProfileHandlerParams,
    HeaderProfileHandler,
    HeaderProfileHandlerParams,
)
from epp.scheduling.pickers import (
    MaxScorePicker,
    MaxScorePickerParams,
    RandomPicker,
    RandomPickerParams,
    WeightedRandomPicker,
    WeightedRandomPickerParams,
)
from epp.scheduling.profiles import SingleProfileHandler


def _max_score(context: BuildContext, params: MaxScorePickerParams) -> MaxScorePicker:
    return MaxScorePicker(params)


def _random(context: BuildContext, params: RandomPickerParams) -> RandomPicker:
    return RandomPicker(params)


def _weighted_random(context: BuildContext, params: WeightedRandomPickerParams) -> WeightedRandomPicker:
    return WeightedRandomPicker(params)


def _single_profile(context: BuildContext, params: NoParameters) -> SingleProfileHandler:
    (profile,) = context.profiles.values()
    return SingleProfileHandler(profile)


def _header_profile(context: BuildContext, params: HeaderProfileHandlerParams) -> HeaderProfileHandler:
    return HeaderProfileHandler(params, context.profiles)


def _data_parallel(
    context: BuildContext, params: DataParallelProfileHandlerParams
) -> DataParallelProfileHandler:
    return DataParallelProfileHandler(params, context.profiles)


_A: Final = Stability.ALPHA
_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("max-score-picker", Kind.PICKER, MaxScorePickerParams, _max_score, _S),
    PluginSpec("random-picker", Kind.PICKER, RandomPickerParams, _random, _S),
    PluginSpec("weighted-random-picker", Kind.PICKER, WeightedRandomPickerParams, _weighted_random, _S),
    PluginSpec("single-profile-handler", Kind.PROFILE_HANDLER, NoParameters, _single_profile, _S),
    PluginSpec(
        "header-profile-handler", Kind.PROFILE_HANDLER, HeaderProfileHandlerParams, _header_profile, _A
    ),
    PluginSpec(
        "data-parallel-profile-handler",
        Kind.PROFILE_HANDLER,
        DataParallelProfileHandlerParams,
        _data_parallel,
        _S,
    ),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("disagg-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("pd-profile-handler", Kind.PROFILE_HANDLER, "disagg-profile-handler"),
    KnownType("always-disagg-pd-decider", Kind.DECIDER),
    KnownType("prefix-based-pd-decider", Kind.DECIDER),
    KnownType("always-disagg-multimodal-decider", Kind.DECIDER),
)
