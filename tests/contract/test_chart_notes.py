"""What a newcomer types: the commands of the chart's notes and of the pages, word by word."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.cli import main
from tests.contract.test_chart_render import CASES, ENVOY_GATEWAY
from tests.data.chart import rendering
from tests.data.chart.rendering import CHART, Object, at, container, merged, objects, of_kind, one, values

ROOT = Path(__file__).parents[2]
PAGES = ("charts/warmroute/README.md", "docs/kubernetes.md", "docs/gateways.md", "README.md")
matrix = pytest.mark.parametrize("case", CASES)


def commands(text: str, program: str) -> list[list[str]]:
    """Those of a text, lines that go on joined."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line.split()[:1] == [program]]


def given_by(command: list[str]) -> Object:
    """The values that the `--set` of a command give."""
    given: Object = {}
    for option, value in zip(command, command[1:], strict=False):
        if option == "--set":
            path, _, written = value.partition("=")
            given = merged(given, at(path, yaml.safe_load(written)))
    return given


def problem(command: list[str], found: list[Object]) -> str:
    """Why `kubectl` could not do this with what was rendered; nothing where it can."""
    namespace, rest = command[command.index("-n") + 1], [each for each in command if each not in ("-n",)]
    if namespace != "ns":
        return f"nothing is in {namespace}"
    match [each for each in rest if each != namespace][1:]:
        case ["port-forward", target, ports]:
            service = _found(found, "Service", target.removeprefix("service/"))
            known = {str(port["port"]) for port in service["spec"]["ports"]} if service else set()
            return "" if ports.rpartition(":")[2] in known else f"{target} has no port {ports}"
        case ["exec", target, "-c", name, "--", "warmroute", subcommand]:
            deployment = target.removeprefix("deployment/")
            if not _found(found, "Deployment", deployment):
                return f"there is no {target}"
            assert container(found, name, deployment)["command"][0] == "warmroute"
            return "" if subcommand in main.commands else f"warmroute has no {subcommand}"
        case ["describe", kind, name]:
            names = [each["metadata"]["name"] for each in found if each["kind"].lower() == kind]
            return "" if name in names else f"there is no {kind} {name}"
    return f"unknown: {command}"


def _found(found: list[Object], kind: str, name: str) -> Any:
    return one(found, kind, name) if name in [e["metadata"]["name"] for e in of_kind(found, kind)] else None


@matrix
def test_kubectl_finds_what_the_notes_name(case: str) -> None:
    found = objects(values(CASES[case]))
    told = commands(rendering.notes(values(CASES[case])), "kubectl")
    assert told
    assert [problem(command, found) for command in told] == [""] * len(told)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("service/rel-proxy", "service/rel-epp"),
        ("8081:80", "8081:8081"),
        ("deployment/rel-epp", "deployment/rel"),
        ("warmroute explain", "warmroute explains"),
        ("-n ns ", "-n default "),
        ("describe envoyextensionpolicy rel-epp", "describe envoyextensionpolicy rel"),
    ],
)
def test_a_note_that_is_wrong_would_be_noticed(old: str, new: str) -> None:
    given = values(CASES["envoy-gateway" if "envoy" in old else "service-everything"])
    found, notes = objects(given), rendering.notes(given)
    assert old in notes
    assert any(problem(command, found) for command in commands(notes.replace(old, new), "kubectl"))


@pytest.mark.parametrize("before", [{}, ENVOY_GATEWAY["envoy-gateway-no-route"]])
def test_the_upgrade_of_the_notes_makes_the_route(before: Object) -> None:
    (command,) = commands(rendering.notes(values(before)), "helm")
    assert [command[index] for index in (1, 2, -5)] == ["upgrade", "rel", "--reuse-values"]
    route = one(objects(values(before, given_by(command))), "HTTPRoute", "rel")
    assert route["spec"]["parentRefs"] == [{"name": "NAME"}]


@pytest.mark.parametrize("page", PAGES)
def test_helm_takes_the_commands_of_the_pages(page: str) -> None:
    told = commands((ROOT / page).read_text(), "helm")
    installs = [command for command in told if command[1] == "install"]
    assert installs or page == "README.md"
    for command in installs:
        assert (ROOT / command[3]).resolve() == CHART.resolve()
        assert objects(given_by(command), command[2])


def test_values_that_the_page_names_are_there() -> None:
    """`a.b.c` in the text above the tables, be it a value or a group of them."""
    text = (CHART / "README.md").read_text().partition("## Values")[0]
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    named = set(re.findall(r"`((?:router|httpRoute|crds|provider)\.[\w.-]+)", text))
    assert len(named) > 5
    for path in named:
        below = schema
        for key in path.split("."):
            assert key in below["properties"], path
            below = below["properties"][key]
