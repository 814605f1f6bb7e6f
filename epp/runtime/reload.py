"""The configuration in use, and its file as it changes."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from epp.config.check import Effective, effective
from epp.config.load import Assembly, build
from epp.config.loaded import LoadedConfig
from epp.config.spec import AT_START
from epp.director import Director, Plugins
from epp.errors import ConfigError
from epp.flow.objectives import Objectives
from epp.payload.rewrite import ModelRewrite, RewriteRules
from epp.pool.records import PoolView
from epp.pool.store import PoolStore
from epp.runtime.metrics import Metrics
from epp.runtime.plugin_timing import Clock, timed_plugins
from epp.runtime.watch import Followed
from epp.scheduling.ports import Member

POLL_S: Final = 1.0
SETTLE_S: Final = 0.25

log = logging.getLogger(__name__)


class PluginMembers:
    """The plugins that hear who joins and leaves the pool, as one member of it."""

    def __init__(self, view: PoolView) -> None:
        self._view = view
        self._members: tuple[Member, ...] = ()

    def use(self, members: Iterable[Member]) -> None:
        """Tell these and no others from now on; new ones hear of the present owners at once."""
        wanted = {id(member): member for member in members}
        known = {id(member) for member in self._members}
        for key, member in wanted.items():
            if key not in known:
                for slot, endpoint in enumerate(self._view.endpoints):
                    if endpoint is not None:
                        member.joined(slot)
        self._members = tuple(wanted.values())

    def joined(self, slot: int) -> None:
        for member in self._members:
            member.joined(slot)

    def left(self, slot: int) -> None:
        for member in self._members:
            member.left(slot)


class Retired(NamedTuple):
    """Plugins of an earlier configuration that requests in flight were placed with."""

    plugins: Plugins
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Policies:
    """Priorities by objective, and model rewrites, that do not come from the configuration file.

    An objective counts in place of the file's of the same name; rewrites take precedence over the file's.
    """

    objectives: Mapping[str, int] = field(default_factory=dict)
    rewrites: tuple[ModelRewrite, ...] = ()

    def over(self, assembly: Assembly) -> Plugins:
        """The assembly's plugins under these policies."""
        loaded = assembly.loaded
        return replace(
            assembly.plugins,
            objectives=Objectives({**loaded.objectives, **self.objectives}),
            rewrites=RewriteRules((*self.rewrites, *loaded.model_rewrites)),
        )


class Running:
    """The one owner of which plugins there are.

    Attributes:
        assembly: in use, its data layer being that of the start.
        plugins: the assembly's, for the director.
        waiting: paths of what differs from `assembly` in the newest file and needs a restart.
        heard_by: are called after another configuration has come into use.
    """

    def __init__(self, loaded: LoadedConfig, store: PoolStore, metrics: Metrics, clock: Clock) -> None:
        """Raises ConfigError: a plugin cannot be built."""
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._secret = os.urandom(32)
        self._started = loaded
        self._members = PluginMembers(store.view)
        self._retired: list[Retired] = []
        self._policies = Policies()
        self.waiting: tuple[str, ...] = ()
        self.heard_by: list[Callable[[], None]] = []
        self.assembly = build(loaded, store.view, self._secret)
        self.plugins = timed_plugins(self.assembly, metrics, clock)
        store.add_member(self._members)
        self._members.use(self.assembly.members)
        self._announce()

    @property
    def effective(self) -> Effective:
        """What is in use, with the file's lines."""
        return effective(self.assembly.loaded, self._started if self.waiting else None)

    def use(self, loaded: LoadedConfig, director: Director) -> None:
        """Put another configuration to use. Requests in flight keep the plugins they were placed with.

        A plugin that is the same under both goes on with what it remembers. The data layer stays as it is;
        `waiting` names what of it would be different.

        Raises:
            ConfigError: a plugin cannot be built; nothing has changed.
        """
        if loaded == self.assembly.loaded:
            return
        made = build(loaded, self._store.view, self._secret, self.assembly)
        waiting = self._needing_a_restart(made)
        assembly = replace(
            made,
            plugins=self._policies.over(made),
            discovery=self.assembly.discovery,
            sources=self.assembly.sources,
        )
        plugins = timed_plugins(assembly, self._metrics, self._clock)
        before = self.assembly
        self._put(assembly, plugins, director)
        for change in assembly.changes:
            change()
        self._tell(before, assembly, waiting)
        self.waiting = waiting
        self._announce()
        for hear in self.heard_by:
            hear()

    def follow(self, policies: Policies, director: Director) -> None:
        """Put priorities and rewrite rules from elsewhere to use, in place of those that came before."""
        if policies == self._policies:
            return
        self._policies = policies
        assembly = replace(self.assembly, plugins=policies.over(self.assembly))
        self._put(assembly, timed_plugins(assembly, self._metrics, self._clock), director)
        self._metrics.pin(assembly.plugins.rewrites.names)

    def _put(self, assembly: Assembly, plugins: Plugins, director: Director) -> None:
        retired = [*self._retired, Retired(self.plugins, self.assembly.members)]
        self._members.use(_all_members(assembly, retired))
        self._retired = retired
        self.assembly, self.plugins = assembly, plugins
        director.plugins = plugins
        self.release(director)

    def release(self, director: Director) -> None:
        """Let go of earlier plugins that no request in flight was placed with."""
        if self._retired:
            self._retired = [each for each in self._retired if director.follows(each.plugins)]
            self._members.use(_all_members(self.assembly, self._retired))

    def _tell(self, before: Assembly, assembly: Assembly, waiting: tuple[str, ...]) -> None:
        """In the log: what comes into use."""
        kept = {id(member) for member in before.members}
        fresh = {id(member) for member in assembly.members} - kept
        anew = [name for name, made in assembly.named.items() if id(made) in fresh]
        log.info("the configuration file is in use", extra={"starting_without_memory": anew})
        if waiting:
            log.warning("restart needed for a part of the configuration file", extra={"paths": list(waiting)})

    def _announce(self) -> None:
        for warning in self.assembly.warnings:
            log.warning(warning)
        self._store.add_attributes(self.assembly.attributes)
        self._metrics.pin(self.assembly.plugins.rewrites.names)

    def _needing_a_restart(self, made: Assembly) -> tuple[str, ...]:
        """Paths in the new file: of the blocks that differ, else of their section."""
        same_discovery = made.discovery == self.assembly.discovery
        same_sources = made.sources == self.assembly.sources
        if same_discovery and same_sources:
            return ()
        before = {plugin.name: plugin for plugin in self._started.plugins}
        blocks = tuple(
            f"{plugin.path}.parameters"
            for plugin in made.loaded.plugins
            if plugin.spec.kind in AT_START
            and (old := before.get(plugin.name)) is not None
            and old.spec.type == plugin.spec.type
            and old.params != plugin.params
        )
        sections = ("$.dataLayer.discovery", same_discovery), ("$.dataLayer.sources", same_sources)
        return blocks or tuple(path for path, same in sections if not same)


def _all_members(assembly: Assembly, retired: Iterable[Retired]) -> list[Member]:
    return [*assembly.members, *(member for each in retired for member in each.members)]


class ConfigFile:
    """Follows a configuration file.

    A content that cannot be used changes nothing, and is not read again before the file changes. A file that
    cannot be read is tried again.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[], LoadedConfig],
        use: Callable[[LoadedConfig], Sequence[str]],
        metrics: Metrics,
        *,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`read` is called on a thread. `use` returns the paths of what needs a restart."""
        self._file = Followed(path, unseen=True)
        self._read = read
        self._use = use
        self._metrics = metrics
        self._poll_s = poll_s
        self._settle_s = settle_s

    async def follow(self) -> None:
        """Until cancelled. Reads the file at the beginning, too: it may have changed since the start."""
        while True:
            await self._file.changed(poll_s=self._poll_s, settle_s=self._settle_s)
            await self._reload()

    async def _reload(self) -> None:
        try:
            waiting = self._use(await asyncio.to_thread(self._read))
        except ConfigError as error:
            if not self._file.failed(error):
                return
            self._failed()
            for problem in error.problems:
                log.error(
                    "the configuration file cannot be used; the old configuration stays",
                    extra={"file": error.source, "problem": str(problem)},
                )
        except Exception:
            self._failed()
            log.exception("the configuration file cannot be used; the old configuration stays")
        else:
            self._metrics.gauge("config_last_reload_successful").set(0 if waiting else 1)

    def _failed(self) -> None:
        self._metrics.counter("config_reload_errors_total").inc()
        self._metrics.gauge("config_last_reload_successful").set(0)
