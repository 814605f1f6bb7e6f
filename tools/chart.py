"""Write what is generated of `charts/warmroute` (`make chart`), or check that it is fresh.

From the structs of `chart_values.py`: values.yaml, values.schema.json and a table of the README. From
`chart_refused.py`: files/refused.json and the other table. From the lab's Envoy configuration: a template.
From `manifests/crds`: the chart below `charts/crds`.
"""

import argparse
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from tools.chart_envoy import envoy_template
from tools.chart_fields import ValuesGroup, flags_schema
from tools.chart_refused import refused
from tools.chart_values import ModelServers, Values

ROOT = Path(__file__).resolve().parents[1]
CHART = "charts/warmroute"
WIDTH = 110
Schema = dict[str, Any]
HEAD = "Written by tools/chart.py"


class Value(msgspec.Struct, frozen=True):
    """One key of the values file.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: a struct, or what the values are.
        default: msgspec.NODEFAULT where it has none.
    """

    key: str
    path: str
    kind: Any
    meta: msgspec.Meta
    default: Any

    @property
    def help(self) -> str:
        return self.meta.description or ""

    @property
    def group(self) -> type[ValuesGroup] | None:
        return self.kind if isinstance(self.kind, type) and issubclass(self.kind, ValuesGroup) else None

    @property
    def required(self) -> bool:
        return bool((self.meta.extra or {}).get("required"))


def values_of(group: type[ValuesGroup], above: str = "") -> Iterator[Value]:
    """The keys of one mapping, in their order."""
    hints = get_type_hints(group, include_extras=True)
    for field in msgspec.structs.fields(group):
        kind, meta = get_args(hints[field.name])
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.to_builtins(field.default_factory())
        path = f"{above}.{field.encode_name}" if above else field.encode_name
        yield Value(field.encode_name, path, kind, meta, default)


def leaves(group: type[ValuesGroup], above: str = "") -> Iterator[Value]:
    """The keys that hold values, of the mapping and of those below."""
    for value in values_of(group, above):
        if value.group:
            yield from leaves(value.group, value.path)
        else:
            yield value


# -- values.yaml -----------------------------------------------------------------------------------


def values_yaml() -> str:
    intro = (
        f"# {HEAD} from tools/chart_values.py, as values.schema.json and the table of the README are.\n"
        "# A key that is not here is refused, and so is a value of the wrong type.\n\n"
    )
    return intro + "\n".join(_written(Values, "", "")) + "\n"


def _written(group: type[ValuesGroup], above: str, indent: str) -> Iterator[str]:
    for number, value in enumerate(values_of(group, above)):
        if number and (value.group or not indent):
            yield ""
        width = WIDTH - len(indent) - 2
        yield from (f"{indent}# {line}" for line in textwrap.wrap(value.help, width, break_on_hyphens=False))
        if value.group:
            yield f"{indent}{value.key}:"
            yield from _written(value.group, value.path, indent + "  ")
        elif value.required:
            yield from _commented(value, indent)
        else:
            if value.meta.examples:
                yield f"{indent}# Such as:"
                yield from _commented(value, indent)
            yield from (indent + line for line in _block({value.key: value.default}))


def _commented(value: Value, indent: str) -> Iterator[str]:
    for example in value.meta.examples or ():
        yield from (f"{indent}#   {line}" for line in _block({value.key: example}))


def _block(value: object) -> list[str]:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=WIDTH)
    return text.rstrip("\n").split("\n")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and in quotes what is empty or looks like something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None if re.fullmatch(r"[A-Za-z/][-\w./]*", text) else '"'
    if style is None and not isinstance(yaml.safe_load(text), str):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


# -- values.schema.json ----------------------------------------------------------------------------


def values_schema() -> str:
    # Draft 7, which every Helm 3 and 4 reads, and editors too.
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Values of {CHART}",
        **_object(Values),
    }
    for group in (schema, schema["properties"]["crds"]):
        group["properties"]["global"] = {"type": "object", "description": "What Helm hands to subcharts."}
    schema["properties"]["router"]["properties"]["epp"]["properties"]["flags"] |= flags_schema()
    _allow_refused(schema)
    _spare_old_files(schema)
    _close(schema)
    return json.dumps(schema, indent=1) + "\n"


def _object(group: type[ValuesGroup]) -> Schema:
    properties = {value.key: _property(value) for value in values_of(group)}
    # What templates rely on: `null` in a values file takes a default away.
    needed = [
        value.key
        for value in values_of(group)
        if value.required or get_origin(value.kind) not in (dict, list)
    ]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _needed(value: Value) -> bool:
    """`null` in a values file takes a default away; templates can do without mappings and most lists."""
    match get_origin(value.kind):
        case origin if origin is dict:
            return value.required
        case origin if origin is list:
            return "minItems" in (value.meta.extra_json_schema or {})
        case _:
            return True


def _property(value: Value) -> Schema:
    extra = dict(value.meta.extra_json_schema or {})
    if value.group:
        return {"description": value.help, **_object(value.group), **extra}
    schema: Schema = {"description": value.help, **_type(value.kind), **extra}
    if value.default is not msgspec.NODEFAULT:
        schema["default"] = value.default
    if value.meta.examples:
        schema["examples"] = value.meta.examples
    return schema


def _type(kind: Any) -> Schema:
    if get_origin(kind) is Literal:
        return {"type": "string", "enum": list(get_args(kind))}
    if get_origin(kind) is dict:
        return {"type": "object"}
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return {"type": "array"} if item is Any else {"type": "array", "items": _type(item)}
    return {"type": {str: "string", int: "integer", bool: "boolean"}[kind]}


def _allow_refused(schema: Schema) -> None:
    """Let values pass that the chart's own check refuses: it says what to write, which a schema cannot."""
    for row in refused():
        *above, key = row.path.split(".")
        at = schema
        for step in above:
            at = at["properties"].setdefault(
                step, {"type": "object", "description": f"Refused: {row.instead}."}
            )
            at.setdefault("properties", {})
        if row.only:
            at["properties"][key]["enum"] += list(row.only)
        elif key not in at["properties"]:
            at["properties"][key] = {"description": f"Refused: {row.instead}."}


def _spare_old_files(schema: Schema) -> None:
    """Ask files for older charts for no value of the new one: they are told where each key went."""
    servers = schema["properties"]["router"]["properties"]["modelServers"]
    needed = [value.key for value in values_of(ModelServers) if value.required]
    servers["required"] = [key for key in servers["required"] if key not in needed]
    schema["if"] = {"not": {"anyOf": [{"required": [row.path]} for row in refused() if "." not in row.path]}}
    schema["then"] = {"properties": {"router": {"properties": {"modelServers": {"required": needed}}}}}


def _close(schema: object) -> None:
    """Give every mapping of known keys their list, so that an error names those that are right."""
    match schema:
        case {"properties": dict() as properties, **_rest}:
            assert isinstance(schema, dict)
            if schema.get("additionalProperties") is False:
                schema["propertyNames"] = {"enum": list(properties)}
            for below in properties.values():
                _close(below)


# -- README ----------------------------------------------------------------------------------------


def readme(written: str) -> str:
    """The README with its tables between their marks written anew."""
    for name, lines in (("values", _value_rows()), ("refused", _refused_rows())):
        begin, end = f"<!-- {name}: {HEAD.lower()} -->\n", f"<!-- end of {name} -->"
        before, _, rest = written.partition(begin)
        _, _, after = rest.partition(end)
        written = before + begin + "\n".join(lines) + "\n" + end + after
    return written


def _value_rows() -> Iterator[str]:
    yield "| Value | Default | Meaning |"
    yield "|---|---|---|"
    for value in leaves(Values):
        default = "" if value.default is msgspec.NODEFAULT else f"`{json.dumps(value.default)}`"
        yield f"| `{value.path}` | {default} | {value.help} |"


def _refused_rows() -> Iterator[str]:
    yield "| Value | Instead |"
    yield "|---|---|"
    for row in refused():
        only = "".join(f": {value}" for value in row.only)
        yield f"| `{row.path}{only}` | {row.instead} |"


# -- all of it -------------------------------------------------------------------------------------


def chart_yaml(written: str) -> str:
    """Chart.yaml with the version of the picker."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    written = re.sub(r"(?m)^version: .*$", f"version: {version}", written, count=1)
    return re.sub(r"(?m)^appVersion: .*$", f'appVersion: "{version}"', written, count=1)


def crds() -> dict[str, str]:
    """The chart of the custom resource definitions, which Helm installs before what needs them."""
    about = {
        "apiVersion": "v2",
        "name": "crds",
        "version": "0.1.0",
        "description": "Custom resource definitions of the inference pool and of its policies",
        "type": "application",
    }
    folder = f"{CHART}/charts/crds"
    definitions = {
        f"{folder}/crds/{file.name}": file.read_text()
        for file in sorted((ROOT / "manifests" / "crds").glob("*.yaml"))
        if file.name != "kustomization.yaml"
    }
    return {f"{folder}/Chart.yaml": f"# {HEAD}.\n" + yaml.safe_dump(about, sort_keys=False), **definitions}


def pages() -> dict[str, str]:
    """Path below the repository and content."""
    rows = [
        {
            "path": row.path,
            "instead": row.instead,
            "only": [json.dumps(value) for value in row.only],
            "harmless": [json.dumps(value) for value in row.harmless],
        }
        for row in refused()
    ]
    return {
        f"{CHART}/values.yaml": values_yaml(),
        f"{CHART}/values.schema.json": values_schema(),
        f"{CHART}/README.md": readme((ROOT / CHART / "README.md").read_text()),
        f"{CHART}/Chart.yaml": chart_yaml((ROOT / CHART / "Chart.yaml").read_text()),
        f"{CHART}/files/refused.json": json.dumps(rows, indent=1) + "\n",
        f"{CHART}/templates/_envoy.tpl": envoy_template(),
        **crds(),
    }


def stale(root: Path) -> list[str]:
    """Files below `root` that are missing, differ from what would be written, or come from nothing."""
    fresh = pages()
    copies = {str(file.relative_to(root)) for file in (root / CHART / "charts").rglob("*") if file.is_file()}
    differ = [name for name, text in fresh.items() if _content(root / name) != text]
    return sorted([*differ, *(copies - fresh.keys())])


def _content(file: Path) -> str | None:
    return file.read_text() if file.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not fresh")
    if not parser.parse_args().check:
        for name in set(stale(ROOT)) - pages().keys():
            (ROOT / name).unlink()
        for name, text in pages().items():
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text)
    elif found := stale(ROOT):
        sys.exit(f"not fresh, run `make chart`: {', '.join(found)}")


if __name__ == "__main__":
    main()
