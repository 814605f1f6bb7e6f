"""What a valid file says, complete with defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from epp.config.document import Document
from epp.config.spec import PluginSpec
from epp.payload.rewrite import ModelRewrite


class Origin(StrEnum):
    """Where a value comes from."""

    FILE = "file"
    DEFAULT = "default"
    START = "kept from the start: restart needed"


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin to build.

    Attributes:
        path: of its block in the file; empty where it is there by default.
        given: its parameters as the file has them; `params` has the defaults filled in.
    """

    name: str
    spec: PluginSpec
    params: msgspec.Struct
    path: str
    given: Mapping[str, Any]

    @property
    def origin(self) -> Origin:
        return Origin.FILE if self.path else Origin.DEFAULT


@dataclass(frozen=True, slots=True)
class PluginUse:
    """A plugin in a profile; `path` is empty where it is there by default. `weight` counts for scorers."""

    name: str
    weight: float
    path: str


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A profile with its picker; `path` is empty for the default profile."""

    name: str
    plugins: tuple[PluginUse, ...]
    path: str


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A data source by name, and what reads its answers; `path` is empty where it is there by default."""

    name: str
    extractors: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, complete with defaults.

    Attributes:
        gates: every feature gate.
        plugins: those of the file in its order, then those there by default.
        handler, discovery: names of plugins; discovery None = not by plugin.
        producers: names of the data producers, each after those whose facts it needs.
        detector: name of the saturation detector.
        parsers: names of the parsers to try, in order; None = the default ones.
        objectives: priorities by name.
        model_rewrites: the one that comes first takes precedence.
    """

    document: Document
    gates: Mapping[str, bool]
    plugins: tuple[LoadedPlugin, ...]
    profiles: tuple[LoadedProfile, ...]
    handler: str
    producers: tuple[str, ...]
    sources: tuple[LoadedSource, ...]
    inject_defaults: bool
    discovery: str | None
    detector: str
    parsers: tuple[str, ...] | None
    objectives: Mapping[str, int]
    model_rewrites: tuple[ModelRewrite, ...]
    warnings: tuple[str, ...]

    @property
    def source(self) -> str:
        """The file's name, for messages."""
        return self.document.source
