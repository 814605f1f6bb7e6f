"""One file while it is resolved: its defined names, and references to them."""

from dataclasses import dataclass, field

from epp.config.decode import Problems, nearest, quoted
from epp.config.loaded import LoadedPlugin
from epp.config.registry import Registry
from epp.config.spec import Kind, PluginSpec, Stability


@dataclass(frozen=True, slots=True)
class Entry:
    """A defined name. `kind` None: the type is unknown. `plugin` None: its block has problems."""

    name: str
    path: str
    kind: Kind | None
    plugin: LoadedPlugin | None


@dataclass(slots=True)
class Reading:
    """One file while it is resolved.

    Attributes:
        allow_experimental: a plugin that is alpha is no problem.
        gates: every feature gate.
    """

    registry: Registry
    problems: Problems
    allow_experimental: bool = True
    gates: dict[str, bool] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)

    def check_stability(self, spec: PluginSpec, path: str, why: str = "") -> None:
        """`path`: of the block to blame. `why`: what the plugin is there for if it has none of its own."""
        if spec.stability is not Stability.ALPHA:
            return
        if self.allow_experimental:
            self.warnings.append(f"{path}: {spec.type} is experimental and may change")
        else:
            self.problems.add(
                path,
                f"{spec.type}{why} is experimental ({spec.stability}); "
                "to use it, start with --allow-experimental-plugins",
            )

    def of_kind(self, *kinds: Kind) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.kind in kinds]

    def refer(self, name: str, path: str, *kinds: Kind) -> Entry | None:
        """The entry a reference means, or None after a problem was added."""
        entry = self.entries.get(name)
        if entry is None:
            hint = nearest(name, self.entries) or f"; defined: {', '.join(self.entries) or 'none'}"
            if name in self.registry.types():
                hint = "; it is a type: put it into $.plugins"
            self.problems.add(path, f"no plugin is named {quoted(name)}{hint[:400]}")
            return None
        if entry.kind is not None and entry.kind not in kinds:
            wanted = " or ".join(kinds)
            self.problems.add(path, f"{name} has kind {entry.kind}, expected {wanted}")
            return None
        return entry

    def provide(self, type_name: str) -> str:
        """The plugin of that name, made with default parameters unless the file defines it."""
        spec = self.registry.specs[type_name]
        entry = self.entries.get(type_name)
        if entry is None:
            plugin = LoadedPlugin(type_name, spec, spec.params(), "", {})
            self.entries[type_name] = Entry(type_name, "", spec.kind, plugin)
        elif entry.kind not in (spec.kind, None):
            self.problems.add(
                f"{entry.path}.name", f"{type_name} is the name of the default {spec.kind}; choose another"
            )
        return type_name
