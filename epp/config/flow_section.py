"""Flow control, saturation detector and objectives of a file."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from epp.config.decode import quoted
from epp.config.reading import Reading
from epp.config.schema import DetectorRef, EndpointPickerConfig, FlowControl, ObjectiveEntry
from epp.config.spec import Kind

DEFAULT_DETECTOR: Final = "utilization-detector"


def check_flow_control(reading: Reading, config: EndpointPickerConfig) -> None:
    """Everything in `$.flowControl` but the detector: checked, and without effect while the gate is off."""
    flow = config.flow_control
    if flow is None:
        return
    of_queues = (
        flow == FlowControl() or msgspec.structs.replace(flow, saturation_detector=None) != FlowControl()
    )
    if of_queues and not reading.gates["flowControl"]:
        but = "" if flow.saturation_detector is None else " but for saturationDetector"
        reading.warnings.append(f"$.flowControl is ignored{but}: the feature gate flowControl is off")
    for path, name, kind in _policies(flow):
        _refer_default(reading, name, f"$.flowControl.{path}", kind)
    seen: set[int] = set()
    for index, band in enumerate(flow.priority_bands):
        if band.priority in seen:
            path = f"$.flowControl.priorityBands[{index}].priority"
            reading.problems.add(path, f"a second band of priority {band.priority}")
        seen.add(band.priority)


def _policies(flow: FlowControl) -> Iterable[tuple[str, str | None, Kind]]:
    """Every reference to a policy: path, name, kind."""
    yield "usageLimitPolicyPluginRef", flow.usage_limit_policy_plugin_ref, Kind.USAGE_LIMIT
    bands = [
        ("defaultPriorityBand", flow.default_priority_band),
        ("defaultNegativePriorityBand", flow.default_negative_priority_band),
        *((f"priorityBands[{index}]", band) for index, band in enumerate(flow.priority_bands)),
    ]
    for path, band in bands:
        if band is not None:
            yield f"{path}.fairnessPolicyRef", band.fairness_policy_ref, Kind.FAIRNESS
            yield f"{path}.orderingPolicyRef", band.ordering_policy_ref, Kind.ORDERING


def _refer_default(reading: Reading, name: str | None, path: str, kind: Kind) -> None:
    """A reference that may also name a type, which then stands for itself with default parameters."""
    if name is None:
        return
    known = reading.registry.not_yet.get(name)
    if name not in reading.entries and known is not None and known.kind is kind:
        return
    reading.refer(name, path, kind)


def saturation_detector(reading: Reading, config: EndpointPickerConfig) -> str:
    """The detector's name: of `$.flowControl`, else of the deprecated place, else the default one.

    It counts with the feature gate and without. To be called when the profiles are known: a detector that the
    file defines filters in the default profile, the one that is there by default does not.
    """
    flow = config.flow_control
    name = ""
    if config.saturation_detector is not None:
        reading.warnings.append(
            "$.saturationDetector is deprecated; its place is $.flowControl.saturationDetector"
        )
        name = _detector(reading, config.saturation_detector, "$.saturationDetector")
    if flow is not None and flow.saturation_detector is not None:
        name = _detector(reading, flow.saturation_detector, "$.flowControl.saturationDetector")
    return name or reading.provide(DEFAULT_DETECTOR)


def _detector(reading: Reading, detector: DetectorRef, path: str) -> str:
    name = detector.plugin_ref
    if name and (name != DEFAULT_DETECTOR or name in reading.entries):
        reading.refer(name, f"{path}.pluginRef", Kind.SATURATION_DETECTOR)
        return name
    return ""


def objectives(reading: Reading, entries: Iterable[ObjectiveEntry]) -> Mapping[str, int]:
    """Priorities by name."""
    priorities: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if entry.name in priorities:
            reading.problems.add(
                f"$.objectives[{index}].name", f"a second objective named {quoted(entry.name)}"
            )
        priorities[entry.name] = entry.priority
    return priorities
