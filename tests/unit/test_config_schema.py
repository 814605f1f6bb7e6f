"""The JSON Schema of the file, held against the loader by another implementation of JSON Schema."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from epp.cli import main
from epp.config.check import effective
from epp.config.document import read_document
from epp.config.json_schema import json_schema
from epp.config.load import load_config
from epp.config.reference import plugin_reference
from epp.config.registry import BUILT_INS, Registry, built_in_registry
from epp.config.schema import NoParameters
from epp.config.spec import Kind, Parameters, PluginSpec, Stability
from epp.durations import Duration
from epp.errors import ConfigError

DATA = Path(__file__).parents[1] / "data" / "config"
HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
PROBLEMS = yaml.safe_load((DATA / "tables" / "problems.yaml").read_text())
FILES = sorted(DATA.glob("*.yaml"))

Schema = dict[str, Any]


@cache
def schema_text() -> str:
    return json.dumps(json_schema(built_in_registry()))


def schema() -> Schema:
    made: Schema = json.loads(schema_text())
    return made


def takes(made: Schema, value: Any) -> bool:
    return bool(Draft202012Validator(made).is_valid(value))


def loads(text: str) -> bool:
    try:
        load_config(text, "file")
    except ConfigError:
        return False
    return True


def block(type_name: str, **parameters: Any) -> dict[str, Any]:
    return {**HEAD, "plugins": [{"type": type_name, "parameters": parameters}]}


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(main, ["config", "schema"])
    assert (result.exit_code, json.loads(result.output)) == (0, schema())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_loads_is_taken(file: Path) -> None:
    text = file.read_text()
    if loads(text):
        assert takes(schema(), read_document(text, file.name).value)
        shown = str(effective(load_config(text, file.name)))
        assert takes(schema(), read_document(shown, "effective").value)


@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row["path"])
def test_what_is_refused_does_not_load(row: dict[str, Any]) -> None:
    """One way only: references and rules among fields are for the loader."""
    value = {**HEAD, **row["file"]}
    assert not loads(yaml.safe_dump(value))


def refused_problems(made: Schema) -> int:
    return sum(not takes(made, {**HEAD, **row["file"]}) for row in PROBLEMS)


def test_most_problems_of_a_single_value_are_seen() -> None:
    assert refused_problems(schema()) > len(PROBLEMS) * 0.5


@pytest.mark.parametrize("spec", BUILT_INS, ids=lambda spec: spec.type)
def test_defaults_of_every_type_are_taken_and_other_fields_refused(spec: PluginSpec) -> None:
    required = [field for field in msgspec.structs.fields(spec.params) if field.required]
    defaults = {
        name: value["default"]
        for name, value in schema()["$defs"][spec.params.__name__]["properties"].items()
        if "default" in value
    }
    assert takes(schema(), block(spec.type, **defaults)) == (not required)
    assert takes(schema(), {**HEAD, "plugins": [{"type": spec.type}]}) == (not required)
    assert not takes(schema(), block(spec.type, **defaults, noSuchParameter=1))
    if not required:
        written = yaml.safe_dump(block(spec.type, **defaults))
        (plugin,) = [each for each in load_config(written, "f").plugins if each.spec.type == spec.type]
        assert plugin.params == spec.params()


@pytest.mark.parametrize(
    "value",
    [0, "0", "0s", "-0s", "-.0s", "+5s", "1h2m3.5s", ".5s", "1.s", "200ms", "5us", "5\u00b5s", "5\u03bcs"]
    + ["", "5", 5, "-5s", "1x", "s", "1 s", "1s ", "+", True, {}],
)
def test_durations_as_the_loader_takes_them(value: Any) -> None:
    try:
        Duration.parse(value)
    except ValueError:
        right = False
    else:
        right = True
    made = block("utilization-detector", metricsStalenessThreshold=value)
    assert takes(schema(), made) == right


@pytest.mark.parametrize(
    "value", [0, 5000, "5000", "1k", "10Gi", "1.5Ki", 3.0, -1, "-1", "1K", "k", True, 1.5, {}, "1 k"]
)
def test_quantities_as_the_loader_takes_them(value: Any) -> None:
    made = {**HEAD, "flowControl": {"maxBytes": value}}
    assert takes(schema(), made) == loads(yaml.safe_dump(made))


def test_every_optional_field_may_stand_without_a_value() -> None:
    for name, made in schema()["$defs"].items():
        for field in set(made["properties"]) - set(made.get("required", ())):
            assert {"type": "null"} in made["properties"][field]["anyOf"], f"{name}.{field}"


def test_gates_and_types_are_listed() -> None:
    for gate, right in (("flowControl=false", True), ("haPopulateNonLeaderDatastore", True), ("flow", False)):
        assert takes(schema(), {**HEAD, "featureGates": [gate]}) == right
    assert set(schema()["$defs"]["PluginEntry"]["properties"]["type"]["enum"]) >= {
        spec.type for spec in BUILT_INS
    }
    assert not takes(schema(), {**HEAD, "plugins": [{"type": "queue-scorrer"}]})
    # Without the gate it has no effect, and is no problem.
    assert takes(schema(), {**HEAD, "plugins": [{"type": "fcfs-ordering-policy"}]})


def test_deprecated_types_say_what_replaces_them() -> None:
    rows = schema()["$defs"]["PluginEntry"]["allOf"]
    about = {row["if"]["properties"]["type"]["const"]: row["if"]["properties"]["type"] for row in rows}
    for spec in BUILT_INS:
        assert about[spec.type].get("deprecated", False) == bool(spec.replaced_by)
        assert (spec.replaced_by or "") in about[spec.type]["description"]


class Loud(Parameters, frozen=True):
    """Parameters of another package's type."""

    volume: int = 3


def theirs(load: Callable[[], object], type_name: str = "loud-scorer") -> Registry:
    own = built_in_registry()
    offers = {type_name: [("their.package:LOUD", load)]}
    return Registry(own.specs, own.not_yet, lambda name: offers.get(name, []), lambda: offers)


def test_types_of_other_packages_are_there() -> None:
    spec = PluginSpec("loud-scorer", Kind.SCORER, Loud, lambda context, params: None, Stability.BETA)
    made = json_schema(theirs(lambda: spec))
    assert takes(made, block("loud-scorer", volume=7))
    assert not takes(made, block("loud-scorer", volume="7"))
    assert not takes(schema(), block("loud-scorer"))


def test_a_package_that_cannot_be_used_is_told() -> None:
    with pytest.raises(ConfigError, match="installed packages: their.package:LOUD cannot be loaded: ZeroDiv"):
        json_schema(theirs(lambda: 1 // 0))


def test_structs_of_one_name_keep_apart() -> None:
    class NoParameters(Parameters, frozen=True):
        """Of that name in another module."""

        only: int = 1

    spec = PluginSpec("loud-scorer", Kind.SCORER, NoParameters, lambda context, params: None, Stability.BETA)
    made = json_schema(theirs(lambda: spec))
    assert takes(made, block("loud-scorer", only=2))
    assert not takes(made, block("queue-scorer", only=2))


ODD_VALUES = (None, True, 0, -1, 1.5, "", "x", "5s", "1k", [], {}, ["x"])


def variants(value: Any) -> Iterator[Any]:
    """Copies of `value` with one part replaced."""
    yield from ODD_VALUES
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for variant in variants(part):
            changed = copy.copy(value)
            changed[key] = variant
            yield changed


@pytest.mark.parametrize("name", ["objectives-and-rewrites", "optimized-baseline", "tiered-prefix-cache-cpu"])
def test_whatever_loads_is_taken(name: str) -> None:
    validator = Draft202012Validator(schema())
    taken = 0
    for variant in variants(yaml.safe_load((DATA / f"{name}.yaml").read_text())):
        if loads(json.dumps(variant)):
            assert validator.is_valid(variant), variant
            taken += 1
    assert taken > 10


# -- the page for people ----------------------------------------------------------------------------


def rows(page: str) -> list[tuple[str, str]]:
    """Type (heading) and parameter of every row."""
    found, heading = [], ""
    for line in page.splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ").strip("`")
        elif line.startswith("| `"):
            found.append((heading, line.split("`")[1]))
    return found


def below(made: Schema, lead: str = "") -> set[str]:
    """Paths of the parameters that a schema's definition has."""
    definitions = schema()["$defs"]
    found = set()
    for name, value in made["properties"].items():
        (value, *_) = value.get("anyOf", [value])
        entry = value.get("items", value)
        path = f"{lead}{name}"
        inner = definitions[entry["$ref"].rpartition("/")[2]] if "$ref" in entry else {}
        if not inner.get("properties"):
            found.add(path)
        else:
            found |= below(inner, f"{path}[]." if "items" in value else f"{path}.")
    return found


def test_the_page_has_every_parameter_that_the_schema_has() -> None:
    page = plugin_reference(built_in_registry())
    head, _, later = page.partition("## Known, not supported yet")
    listed: dict[str, set[str]] = {}
    for type_name, parameter in rows(head):
        listed.setdefault(type_name, set()).add(parameter)
    for spec in BUILT_INS:
        assert f"`{spec.type}`" in head
        wanted = below(schema()["$defs"][spec.params.__name__])
        if spec.replaced_by is None:
            assert wanted <= listed.get(spec.type, set())
    for known in built_in_registry().not_yet:
        assert f"`{known}`" in later
        assert f"`{known}`" not in head


def test_defaults_of_inner_mappings_are_those_that_count() -> None:
    page = plugin_reference(built_in_registry())
    assert "| `estimate.image.defaultResolution.width` | whole number from 0 | `640` |" in page
    assert "| `metricsStalenessThreshold` | duration | `200ms` |" in page
    assert "| `path` | text, not empty | required |" in page
    assert "| `maxEstimatedOutputTokens` | whole number from 0 |  |" in page
    assert "`by-label-selector` (deprecated: use `label-selector-filter`)" in page


def test_parameters_that_shape_state_are_attributes() -> None:
    for spec in BUILT_INS:
        names = {field.name for field in msgspec.structs.fields(spec.params)}
        assert set(spec.state_parameters or ()) <= names, spec.type


# -- faults -----------------------------------------------------------------------------------------


def _open(made: Schema) -> None:
    for each in made["$defs"].values():
        each.pop("additionalProperties", None)


def _blind(made: Schema) -> None:
    made["$defs"]["PluginEntry"].pop("allOf")


def _strict_null(made: Schema) -> None:
    for each in made["$defs"].values():
        each["properties"] = {
            name: {**value["anyOf"][0]} if {"type": "null"} in value.get("anyOf", ()) else value
            for name, value in each["properties"].items()
        }


def _boundless(made: Schema) -> None:
    text = json.dumps(made)
    for word in ("minimum", "maximum", "minLength"):
        text = text.replace(f'"{word}"', f'"x-{word}"')
    made.clear()
    made.update(json.loads(text))


@pytest.mark.parametrize("fault", [_open, _blind, _boundless])
def test_a_looser_schema_sees_fewer_problems(fault: Callable[[Schema], None]) -> None:
    made = copy.deepcopy(schema())
    fault(made)
    assert refused_problems(made) < refused_problems(schema())


def test_a_stricter_schema_refuses_what_loads() -> None:
    made = copy.deepcopy(schema())
    _strict_null(made)
    value = {**HEAD, "plugins": None, "dataLayer": None}
    assert takes(schema(), value)
    assert loads(yaml.safe_dump(value))
    assert not takes(made, value)
    assert NoParameters.__name__ in made["$defs"]
