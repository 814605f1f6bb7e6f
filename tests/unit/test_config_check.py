"""The effective configuration: complete, true about its sources, and itself a configuration."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.check import effective
from epp.config.load import default_config, load_config
from epp.config.loaded import LoadedConfig

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
DATA = Path(__file__).parents[1] / "data" / "config"

ODD = r"""apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
featureGates: [haPopulateNonLeaderDatastore, flowControl=false]
plugins:
- name: "yes"
  type: queue-scorer
- name: 'it''s: a # name'
  type: kv-cache-utilization-scorer
- name: "1e3"
  type: prefix-cache-scorer
  parameters: {matchLengthWeight: 0.125, prefixMatchInfoProducerName: p}
- {name: p, type: approx-prefix-cache-producer, parameters: {autoTune: no}}
- {type: token-producer, parameters: {estimate: {}}}
- name: "é\t\u2028\U0001F600\x7f"
  type: file-discovery
  parameters: {path: "C:\\pods.yaml"}
- {name: m, type: metrics-data-source, parameters: {interval: 250ms}}
schedulingProfiles:
- name: '- x'
  plugins:
  - {pluginRef: "1e3", weight: 1e-3}
  - {pluginRef: "yes", weight: 1234567.5}
  - {pluginRef: 'it''s: a # name'}
dataLayer:
  discovery: {pluginRef: "é\t\u2028\U0001F600\x7f"}
flowControl: {maxBytes: 1Gi}
"""


def meaning(loaded: LoadedConfig) -> Any:
    """All that matters of a configuration, its sources aside."""
    return (
        {plugin.name: (plugin.spec.type, plugin.params) for plugin in loaded.plugins},
        [(each.name, [(use.name, use.weight) for use in each.plugins]) for each in loaded.profiles],
        (loaded.handler, loaded.discovery, loaded.producers),
        [(source.name, source.extractors) for source in loaded.sources],
        dict(loaded.gates),
        loaded.inject_defaults,
        (loaded.detector, loaded.parsers),
        (dict(loaded.objectives), loaded.model_rewrites),
    )


CASES = [
    HEAD,
    ODD,
    (DATA / "default-with-file-discovery.yaml").read_text(),
    (DATA / "tiered-prefix-cache-cpu.yaml").read_text(),
    (DATA / "objectives-and-rewrites.yaml").read_text(),
    (DATA / "probabilistic-admitter.yaml").read_text(),
    HEAD + "plugins: [{type: concurrency-detector}]\nsaturationDetector: {pluginRef: concurrency-detector}\n",
    HEAD + "dataLayer: {injectDefaults: false}\n",
    HEAD
    + """plugins:
- {name: a, type: core-metrics-extractor}
- {name: b, type: core-metrics-extractor, parameters: {defaultEngine: sglang}}
- {name: models, type: models-data-source}
dataLayer:
  sources: [{pluginRef: models}]
""",
]


@pytest.mark.parametrize("text", CASES)
def test_it_is_a_configuration_that_means_the_same(text: str) -> None:
    loaded = load_config(text, "file")
    again = load_config(str(effective(loaded)), "effective")
    assert meaning(again) == meaning(loaded)
    assert meaning(load_config(str(effective(again)), "effective")) == meaning(loaded)


def test_the_default_configuration_means_itself() -> None:
    loaded = default_config()
    assert meaning(load_config(str(effective(loaded)), "effective")) == meaning(loaded)


def comments(text: str) -> dict[str, str]:
    """Source comment of each `key: value` line that has one, by its text."""
    found = {}
    for line in text.splitlines():
        if " # " in line and not line.startswith("#"):
            value, _, comment = line.rpartition(" # ")
            found[value.strip()] = comment
    return found


def test_every_value_says_where_it_comes_from() -> None:
    text = HEAD + (
        "plugins:\n"
        "- type: queue-scorer\n"
        "- type: prefix-cache-scorer\n"
        "  parameters:\n"
        "    matchLengthWeight: 0.5\n"
        "schedulingProfiles:\n"
        "- name: p\n"
        "  plugins:\n"
        "  - pluginRef: queue-scorer\n"
        "    weight: 2\n"
        "  - pluginRef: prefix-cache-scorer\n"
    )
    shown = comments(str(effective(load_config(text, "file"))))
    assert shown["apiVersion: llm-d.ai/v1alpha1"] == "file, line 1"
    assert shown["type: queue-scorer"] == "file, line 4"
    assert shown["- name: queue-scorer"] == "default"
    assert shown["matchLengthWeight: 0.5"] == "file, line 7"
    assert shown["matchLengthScaleTokens: 8192"] == "default"
    assert shown["- name: p"] == "file, line 9"
    assert shown["weight: 2"] == "file, line 12"
    assert shown["weight: 1"] == "default"
    assert shown["- pluginRef: max-score-picker"] == "default"
    assert shown["- flowControl=false"] == "default"
    assert shown["autoTune: true"] == "default"


def test_each_scalar_has_a_source() -> None:
    for text in CASES:
        for line in str(effective(load_config(text, "file"))).splitlines():
            if not line.startswith("# warning: ") and not line.endswith(":"):
                assert line.endswith("# default") or "# file, line " in line, line


def test_the_default_has_nothing_from_a_file() -> None:
    assert set(comments(str(effective(default_config()))).values()) == {"default"}


def test_warnings_stand_at_the_top() -> None:
    lines = str(effective(load_config(ODD, "file"))).splitlines()
    assert lines[0].startswith(
        "# warning: $.apiVersion: inference.networking.x-k8s.io/v1alpha1 is deprecated"
    )
    assert lines[1].startswith("# warning: $.flowControl is ignored")


@pytest.mark.parametrize("text", CASES)
def test_other_readers_read_the_same(text: str) -> None:
    loaded = load_config(text, "file")
    document = yaml.safe_load(str(effective(loaded)))
    assert [plugin["name"] for plugin in document["plugins"]] == [plugin.name for plugin in loaded.plugins]
    assert list(document) == [
        "apiVersion",
        "kind",
        "featureGates",
        "plugins",
        "schedulingProfiles",
        "dataLayer",
        "flowControl",
        *(section for section in ("objectives", "modelRewrites") if section in text),
    ]
