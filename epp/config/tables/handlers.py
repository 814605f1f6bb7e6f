"""Types of pickers, profile handlers and deciders."""

from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, KnownType, PluginSpec, Stability
from epp.scheduling.pickers import MaxScorePicker, MaxScorePickerParams
from epp.scheduling.profiles import SingleProfileHandler


def _max_score(context: BuildContext, params: MaxScorePickerParams) -> MaxScorePicker:
    return MaxScorePicker(params)


def _single_profile(context: BuildContext, params: NoParameters) -> SingleProfileHandler:
    (profile,) = context.profiles.values()
    return SingleProfileHandler(profile)


_S: Final = Stability.STABLE

BUILT_INS: Final[tuple[PluginSpec, ...]] = (
    PluginSpec("max-score-picker", Kind.PICKER, MaxScorePickerParams, _max_score, _S),
    PluginSpec("single-profile-handler", Kind.PROFILE_HANDLER, NoParameters, _single_profile, _S),
)

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("random-picker", Kind.PICKER),
    KnownType("weighted-random-picker", Kind.PICKER),
    KnownType("disagg-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("pd-profile-handler", Kind.PROFILE_HANDLER, "disagg-profile-handler"),
    KnownType("data-parallel-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("header-profile-handler", Kind.PROFILE_HANDLER),
    KnownType("always-disagg-pd-decider", Kind.DECIDER),
    KnownType("prefix-based-pd-decider", Kind.DECIDER),
    KnownType("always-disagg-multimodal-decider", Kind.DECIDER),
)
