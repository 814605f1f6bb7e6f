"""The generated files of the chart: fresh, and saying the same as the structs they come from."""

import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from epp.durations import Duration
from epp.runtime.options import flags
from tests.data.chart.rendering import CHART, at, values
from tools import chart, chart_envoy
from tools.chart_values import Values

ROOT = CHART.parents[1]
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
LEAVES = list(chart.leaves(Values))


def valid(given: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft7Validator(SCHEMA).is_valid(given))


def whole(*parts: dict[str, Any]) -> dict[str, Any]:
    """The defaults with these over them, as Helm checks them."""
    return values(DEFAULTS, values(), *parts)


def found(path: str, tree: dict[str, Any]) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


def test_generated_files_are_fresh() -> None:
    assert chart.stale(ROOT) == []


def test_the_check_sees_what_is_missing_changed_or_left_over(tmp_path: Path) -> None:
    assert chart.stale(tmp_path) == sorted(chart.pages())
    for name, text in chart.pages().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert chart.stale(tmp_path) == []
    changed, old = f"{chart.CHART}/values.yaml", f"{chart.CHART}/charts/crds/crds/old.yaml"
    (tmp_path / changed).write_text("router: {}\n")
    (tmp_path / old).write_text("kind: CustomResourceDefinition\n")
    assert chart.stale(tmp_path) == sorted([changed, old])


def test_versions_are_those_of_the_picker() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (about["version"], about["appVersion"]) == (version, version)


def test_the_schema_is_one_and_takes_the_defaults() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert valid(whole())


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: value.path)
def test_every_value_is_in_file_schema_and_readme_with_its_help(value: chart.Value) -> None:
    assert value.help.endswith(".")
    *above, key = value.path.split(".")
    about = SCHEMA
    for step in above:
        about = about["properties"][step]
    assert about["properties"][key]["description"] == value.help
    assert f"| `{value.path}` |" in (CHART / "README.md").read_text()
    if value.required:
        assert f"#   {key}:" in (CHART / "values.yaml").read_text()
    else:
        assert found(value.path, DEFAULTS) == value.default


@pytest.mark.parametrize("value", [leaf for leaf in LEAVES if leaf.meta.examples], ids=lambda leaf: leaf.path)
def test_examples_are_right(value: chart.Value) -> None:
    assert value.meta.examples
    for example in value.meta.examples:
        assert valid(whole(at(value.path, example)))


def test_every_mapping_of_known_keys_refuses_others() -> None:
    groups = {"", *(path.rpartition(".")[0] for path in (leaf.path for leaf in LEAVES))}
    for group in groups - {"router.latencyPredictor"}:
        wrong = at(f"{group}.repilcas".lstrip("."), 1)
        assert not valid(whole(wrong)), group


def test_every_flag_of_serve_has_its_shape() -> None:
    known = SCHEMA["properties"]["router"]["properties"]["epp"]["properties"]["flags"]["properties"]
    for flag in flags():
        name = flag.names[-1].lstrip("-")
        assert name in known
        right: object = {bool: "true", int: 3, Duration: "3s"}.get(flag.kind, "text")
        assert valid(whole(at(f"router.epp.flags.{name}", right))), name
        assert not valid(whole(at(f"router.epp.flags.{name}", [right]))), name
    assert not valid(whole(at("router.epp.flags.v", "three")))
    assert not valid(whole(at("router.epp.flags.secure-serving", "no")))


def test_a_file_for_older_charts_need_not_have_the_labels() -> None:
    assert not valid(DEFAULTS)
    assert valid(DEFAULTS | {"inferencePool": {}})


def test_a_changed_source_of_the_proxy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        text = ""

        def joinpath(self, _name: str) -> "Source":
            return self

        def read_text(self, encoding: str) -> str:
            return self.text

    whole_text = files("epp.lab").joinpath("envoy.yaml.in").read_text(encoding="utf-8")
    monkeypatch.setattr(chart_envoy, "files", lambda _package: Source())
    monkeypatch.setattr(Source, "text", whole_text)
    assert chart_envoy.envoy_template() == (CHART / "templates" / "_envoy.tpl").read_text()
    for old, new in (
        ("- name: engines\n    type: STATIC", ""),
        ("http_health_check", "check"),
        ("  clusters:\n", ""),
    ):
        monkeypatch.setattr(Source, "text", whole_text.replace(old, new))
        with pytest.raises(SystemExit, match=r"envoy\.yaml\.in"):
            chart_envoy.envoy_template()
