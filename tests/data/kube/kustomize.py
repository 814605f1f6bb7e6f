"""The part of kustomize that `manifests/` uses, so that what it makes can be looked at without kubectl.

That is resources, components, patches (RFC 6902) by kind and name, and configMapGenerator with files; the
rest is an error here. Names of generated ConfigMaps get no hash.
"""

from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}


class Unsupported(Exception):
    """The kustomization asks for what is not here, or for what is not there."""


def render(folder: Path) -> list[Object]:
    return built(folder, [])


def built(folder: Path, objects: list[Object]) -> list[Object]:
    """`objects`, those that a component changes, and what the kustomization of the folder adds."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := wanted.keys() - _KNOWN:
        raise Unsupported(f"{folder}: {sorted(unknown)}")
    objects = list(objects)
    for entry in wanted.get("resources", ()):
        objects += _resource(folder / entry)
    for generated in wanted.get("configMapGenerator", ()):
        objects.append(_config_map(folder, generated))
    for entry in wanted.get("components", ()):
        objects = built(folder / entry, objects)
    for patch in wanted.get("patches", ()):
        _patch(folder, patch, objects)
    return objects


def _resource(path: Path) -> list[Object]:
    return render(path) if path.is_dir() else read(path)


def read(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def _config_map(folder: Path, wanted: Object) -> Object:
    if unknown := wanted.keys() - {"name", "files", "options"}:
        raise Unsupported(f"{folder}: configMapGenerator: {sorted(unknown)}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": wanted["name"], "labels": wanted.get("options", {}).get("labels", {})},
        "data": {name: (folder / name).read_text() for name in wanted["files"]},
    }


def _patch(folder: Path, patch: Object, objects: list[Object]) -> None:
    target = patch["target"]
    operations = yaml.safe_load(patch.get("patch") or (folder / patch["path"]).read_text())
    found = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
    ]
    if len(found) != 1:
        raise Unsupported(f"{folder}: {len(found)} objects are {target}")
    for operation in operations:
        _perform(operation, found[0])


def _perform(operation: Object, document: Any) -> None:
    *way, last = operation["path"].strip("/").split("/")
    for step in way:
        document = document[int(step) if isinstance(document, list) else step]
    key = int(last) if isinstance(document, list) and last != "-" else last
    match operation["op"], document:
        case "add", list() if key == "-":
            document.append(operation["value"])
        case "add" | "replace", _:
            if operation["op"] == "replace" and isinstance(document, dict) and key not in document:
                raise Unsupported(f"nothing is at {operation['path']}")
            document[key] = operation["value"]
        case "test", _:
            if document[key] != operation["value"]:
                raise Unsupported(f"{operation['path']} is {document[key]!r}")
        case _:
            raise Unsupported(str(operation))
