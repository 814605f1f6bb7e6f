"""The CRDs of `manifests/crds`: what an API server would take by them, and that they are well formed."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp import names
from tests.data.kube import admission, kustomize

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
CASES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/data/kube/crd_cases.yaml").read_text())
VERSIONS = {
    names.POOL_KIND: f"{names.POOL_GROUP}/{names.POOL_VERSION}",
    names.OBJECTIVE_KIND: f"{names.LLM_D_GROUP}/{names.POLICY_VERSION}",
    names.MODEL_REWRITE_KIND: f"{names.LLM_D_GROUP}/{names.POLICY_VERSION}",
}
PLURALS = {
    names.POOL_KIND: names.POOL_RESOURCE,
    names.OBJECTIVE_KIND: names.OBJECTIVE_RESOURCE,
    names.MODEL_REWRITE_KIND: names.MODEL_REWRITE_RESOURCE,
}

Crds = dict[str, dict[str, Any]]


CRDS: Crds = {crd["spec"]["names"]["kind"]: crd for crd in kustomize.render(MANIFESTS / "crds")}


def thing(case: dict[str, Any]) -> dict[str, Any]:
    parts = {part: deepcopy(case[part]) for part in ("spec", "status") if part in case}
    return {
        "apiVersion": VERSIONS[case["kind"]],
        "kind": case["kind"],
        "metadata": {"name": case["name"]},
        **parts,
    }


def fault(case: dict[str, Any], crds: Crds) -> str:
    """How the verdict differs from what the case says; empty: it does not."""
    sent = thing(case)
    found = admission.errors(crds[case["kind"]], sent)
    if "refused" in case:
        told = any(case["refused"] in error for error in found)
        return "" if told else f"{case['refused']!r} is not in {found}"
    if found:
        return f"refused: {found}"
    stored = {path: at(sent, path) for path in case.get("stored", {})}
    return "" if stored == case.get("stored", {}) else f"stored: {stored}"


def at(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_api_server_says_so(case: dict[str, Any]) -> None:
    assert fault(case, CRDS) == ""


def test_cases_have_names_of_their_own() -> None:
    told = [case["name"] for case in CASES]
    assert len(told) == len(set(told))
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in told)


def spec_of(crds: Crds, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = crds[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema["properties"]["spec"]["properties"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "path", "key", "value"),
    [
        ("InferencePool", "targetPorts", "x-kubernetes-validations", []),
        ("InferencePool", "endpointPickerRef", "x-kubernetes-validations", []),
        ("InferencePool", "targetPorts", "maxItems", 7),
        ("InferencePool", "appProtocol", "default", "kubernetes.io/h2c"),
        ("InferencePool", "endpointPickerRef.properties.failureMode", "enum", ["FailClose", "FailClosed"]),
        ("InferencePool", "selector.properties.matchLabels", "minProperties", 0),
        ("InferenceObjective", "poolRef.properties.group", "default", "llm-d.ai"),
        ("InferenceObjective", "priority", "format", "int64"),
        ("InferenceModelRewrite", "rules.items.properties.targets", "minItems", 0),
        ("InferenceModelRewrite", "rules.items", "required", ["matches"]),
    ],
)
def test_cases_see_a_faulty_schema(kind: str, path: str, key: str, value: Any) -> None:
    faulty = deepcopy(CRDS)
    at(spec_of(faulty, kind), path)[key] = value
    assert any(fault(case, faulty) for case in CASES)


# -- form -----------------------------------------------------------------------------------------------


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def structural_faults(crd: dict[str, Any]) -> list[str]:
    """What an API server would not take for a structural schema, or `kubectl explain` could not explain."""
    faults = []
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in nodes(schema):
        if node.get("type") not in {"object", "array", "string", "integer"}:
            faults.append(f"{path}: type")
        if not node.get("description") and path != ".metadata":
            faults.append(f"{path}: description")
        if missing := set(node.get("required", ())) - node.get("properties", {}).keys():
            faults.append(f"{path}: required {missing}")
        if keys := set(node.get("x-kubernetes-list-map-keys", ())) - set(
            node.get("items", {}).get("required", ())
        ):
            faults.append(f"{path}: list map keys {keys}")
        # The API server's patterns are RE2's: nothing that looks ahead, behind or back.
        if re.search(r"\(\?|\\[1-9]", node.get("pattern", "")):
            faults.append(f"{path}: pattern")
        if "default" in node and list(admission._walk(node, deepcopy(node["default"]), path)):
            faults.append(f"{path}: default")
    return faults


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_crd_is_well_formed(kind: str) -> None:
    crd = CRDS[kind]
    group, version = VERSIONS[kind].split("/")
    spec = crd["spec"]
    assert crd["apiVersion"] == "apiextensions.k8s.io/v1"
    assert crd["metadata"]["name"] == f"{PLURALS[kind]}.{group}"
    assert (spec["group"], spec["scope"], spec["names"]["plural"]) == (group, "Namespaced", PLURALS[kind])
    assert spec["names"] | {"listKind": f"{kind}List", "singular": kind.lower()} == spec["names"]
    (only,) = spec["versions"]
    assert (only["name"], only["served"], only["storage"]) == (version, True, True)
    assert only["subresources"] == {"status": {}}
    assert structural_faults(crd) == []
    if group.endswith(".k8s.io"):
        assert crd["metadata"]["annotations"]["api-approved.kubernetes.io"].startswith("https://")


def test_columns_are_those_of_the_field() -> None:
    age = ("Age", "date", ".metadata.creationTimestamp")
    pool = ("Inference Pool", "string", ".spec.poolRef.name")
    wanted = {
        "InferencePool": [],
        "InferenceObjective": [pool, ("Priority", "string", ".spec.priority"), age],
        "InferenceModelRewrite": [pool, age],
    }
    for kind, crd in CRDS.items():
        columns = crd["spec"]["versions"][0].get("additionalPrinterColumns", [])
        assert [(one["name"], one["type"], one["jsonPath"]) for one in columns] == wanted[kind]


def test_nobody_has_judged_a_new_object_yet() -> None:
    for kind, condition in {"InferenceObjective": "Ready", "InferenceModelRewrite": "Accepted"}.items():
        schema = CRDS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        (default,) = schema["properties"]["status"]["properties"]["conditions"]["default"]
        assert (default["type"], default["status"], default["reason"]) == (condition, "Unknown", "Pending")


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("targetPorts", "type", "list"),
        ("targetPorts", "description", ""),
        ("endpointPickerRef", "required", ["names"]),
        ("appProtocol", "default", "h2c"),
        ("endpointPickerRef.properties.kind", "pattern", "^(?!x)"),
        ("targetPorts", "x-kubernetes-list-map-keys", ["name"]),
    ],
)
def test_form_guard_sees_faults(path: str, key: str, value: Any) -> None:
    faulty = deepcopy(CRDS)
    at(spec_of(faulty, "InferencePool"), path)[key] = value
    assert structural_faults(faulty["InferencePool"])


# -- what we ship fits ----------------------------------------------------------------------------------


def shipped() -> list[dict[str, Any]]:
    files = sorted(MANIFESTS.glob("samples/*.yaml"))
    objects = [each for file in files for each in kustomize.read(file)]
    for overlay in sorted(MANIFESTS.glob("overlays/*")):
        objects += kustomize.render(overlay)
    return [each for each in objects if each["kind"] in VERSIONS]


def test_what_is_shipped_fits() -> None:
    objects = shipped()
    assert {each["kind"] for each in objects} == set(VERSIONS)
    for each in objects:
        assert admission.errors(CRDS[each["kind"]], deepcopy(each)) == []
