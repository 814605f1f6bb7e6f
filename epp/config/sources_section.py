"""Data sources of a file, and what reads their answers."""

from collections.abc import Iterable
from typing import Final

from epp.config.loaded import LoadedSource
from epp.config.reading import Entry, Reading
from epp.config.schema import DataLayer, SourceEntry
from epp.config.spec import Kind

DEFAULT_SOURCE: Final = "metrics-data-source"


def data_sources(reading: Reading, layer: DataLayer) -> tuple[LoadedSource, ...]:
    """The sources of the file with their extractors, and the metrics source where it is to be injected."""
    sources: dict[str, LoadedSource] = {}
    for index, entry in enumerate(layer.sources):
        path = f"$.dataLayer.sources[{index}]"
        if entry.plugin_ref in sources:
            reading.problems.add(f"{path}.pluginRef", f"{entry.plugin_ref} is a source here already")
            continue
        sources[entry.plugin_ref] = _source(reading, layer, entry, path)
    if layer.inject_defaults and not any(_is_metrics_source(reading, name) for name in sources):
        name = _defined_metrics_source(reading) or reading.provide(DEFAULT_SOURCE)
        sources[name] = LoadedSource(name, _default_extractors(reading, layer, reading.entries[name]), "")
    if not sources:
        reading.warnings.append(
            "$.dataLayer: no sources, and injectDefaults is false: "
            "of the engines' load only what this picker sent is known"
        )
    _warn_unused(reading, sources.values())
    return tuple(sources.values())


def _source(reading: Reading, layer: DataLayer, entry: SourceEntry, path: str) -> LoadedSource:
    source = reading.refer(entry.plugin_ref, f"{path}.pluginRef", Kind.DATA_SOURCE)
    names: list[str] = []
    for number, ref in enumerate(entry.extractors):
        place = f"{path}.extractors[{number}].pluginRef"
        if ref.plugin_ref in names:
            reading.problems.add(place, f"{ref.plugin_ref} is an extractor of this source already")
            continue
        names.append(ref.plugin_ref)
        extractor = reading.refer(ref.plugin_ref, place, Kind.EXTRACTOR)
        _check_content(reading, source, extractor, place)
    if not names and source is not None:
        return LoadedSource(source.name, _default_extractors(reading, layer, source), path)
    return LoadedSource(entry.plugin_ref, tuple(names), path)


def _check_content(reading: Reading, source: Entry | None, extractor: Entry | None, path: str) -> None:
    """Blocks with problems of their own get the benefit of the doubt."""
    fetched, read = _content(source), _content(extractor)
    if source is None or extractor is None or not fetched or not read or fetched == read:
        return
    reading.problems.add(path, f"{extractor.name} reads a {read}, {source.name} fetches a {fetched}")


def _content(entry: Entry | None) -> str:
    return "" if entry is None or entry.plugin is None else entry.plugin.spec.content


def _default_extractors(reading: Reading, layer: DataLayer, source: Entry) -> tuple[str, ...]:
    """For a source without any: the defined ones of its content that no source names, else the built-in."""
    content = _content(source)
    referred = {ref.plugin_ref for entry in layer.sources for ref in entry.extractors}
    free = [
        entry.name
        for entry in reading.of_kind(Kind.EXTRACTOR)
        if entry.path and entry.name not in referred and _content(entry) == content
    ]
    if free or not content:
        return tuple(free)
    specs = reading.registry.specs.values()
    built_in = next(spec for spec in specs if spec.kind is Kind.EXTRACTOR and spec.content == content)
    return (reading.provide(built_in.type),)


def _is_metrics_source(reading: Reading, name: str) -> bool:
    entry = reading.entries.get(name)
    return entry is not None and (entry.plugin is None or entry.plugin.spec.type == DEFAULT_SOURCE)


def _defined_metrics_source(reading: Reading) -> str | None:
    for entry in reading.of_kind(Kind.DATA_SOURCE):
        if entry.plugin is not None and entry.plugin.spec.type == DEFAULT_SOURCE:
            return entry.name
    return None


def _warn_unused(reading: Reading, sources: Iterable[LoadedSource]) -> None:
    used = {name for source in sources for name in (source.name, *source.extractors)}
    for entry in reading.of_kind(Kind.DATA_SOURCE, Kind.EXTRACTOR):
        if entry.name not in used:
            reading.warnings.append(
                f"{entry.path}: {entry.name} is not used; refer to it in $.dataLayer.sources"
            )
