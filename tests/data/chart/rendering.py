"""The chart, rendered by Helm's own engine, and ways to look at what comes out."""

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import helm_python
import yaml

from epp.cli import main
from epp.runtime.options import Options

CHART = Path(__file__).resolve().parents[3] / "charts" / "warmroute"
Object = dict[str, Any]
LABELS = {"app": "vllm-qwen3-32b"}
NEEDED: Object = {"router": {"modelServers": {"matchLabels": LABELS}}}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Object:
    """`other` over `one`, mappings united."""
    both = dict(one)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(both.get(key), dict):
            value = merged(both[key], value)
        both[key] = value
    return both


def at(path: str, value: object) -> Object:
    """A values file with one value."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def values(*parts: Mapping[str, Any]) -> Object:
    """What every release needs, and these over it."""
    result = copy.deepcopy(NEEDED)
    for part in parts:
        result = merged(result, part)
    return result


def render(given: Mapping[str, Any], name: str = "rel", namespace: str = "ns") -> dict[str, str]:
    """Template and text. Raises helm_python.HelmError."""
    return dict(_render(json.dumps(given, sort_keys=True), name, namespace))


@cache
def _render(given: str, name: str, namespace: str) -> Mapping[str, str]:
    # A chart that rendered once keeps only the subcharts that were wanted then.
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(json.loads(given), name=name, namespace=namespace)


def objects(given: Mapping[str, Any], name: str = "rel", namespace: str = "ns") -> list[Object]:
    """Everything that an API server would be sent."""
    return copy.deepcopy(_objects(json.dumps(given, sort_keys=True), name, namespace))


@cache
def _objects(given: str, name: str, namespace: str) -> list[Object]:
    texts = sorted(_render(given, name, namespace).items())
    manifests = (text for path, text in texts if not path.endswith("NOTES.txt"))
    return [found for text in manifests for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def notes(given: Mapping[str, Any]) -> str:
    return render(given)["warmroute/templates/NOTES.txt"]


def refusal(given: Mapping[str, Any]) -> str:
    """What Helm says instead of rendering; empty where it renders."""
    try:
        render(given)
    except helm_python.HelmError as error:
        return str(error)
    return ""


def of_kind(found: list[Object], kind: str) -> list[Object]:
    return [each for each in found if each["kind"] == kind]


def one(found: list[Object], kind: str, name: str = "rel-epp") -> Object:
    (match,) = [each for each in of_kind(found, kind) if each["metadata"]["name"] == name]
    return match


def pod_specs(found: list[Object]) -> Iterator[Object]:
    for deployment in of_kind(found, "Deployment"):
        yield deployment["spec"]["template"]["spec"]


def container(found: list[Object], name: str = "epp", deployment: str = "rel-epp") -> Object:
    spec = one(found, "Deployment", deployment)["spec"]["template"]["spec"]
    (match,) = [each for each in spec["containers"] if each["name"] == name]
    assert isinstance(match, dict)
    return match


def parsed(args: list[str]) -> Options:
    """The arguments as `warmroute serve` reads them. Raises click.UsageError."""
    serve = main.commands["serve"]
    with click.Context(serve) as context:
        serve.parse_args(context, list(args))
        return Options(**context.params)


def configuration(found: list[Object]) -> dict[str, str]:
    return dict(one(found, "ConfigMap")["data"])


def envoy(found: list[Object]) -> Any:
    return yaml.safe_load(one(found, "ConfigMap", "rel-proxy")["data"]["envoy.yaml"])
