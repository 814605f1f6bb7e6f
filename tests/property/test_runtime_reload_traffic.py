"""Configurations that change under traffic: nothing is lost or refused, every hook hears all of its own.

After each step a model says which plugins each open request was placed with, and what they must know.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from epp.config import load as load_module
from epp.director import Director
from epp.errors import ConfigError
from epp.payload.records import RawRequest
from epp.runtime import reload as reload_module
from epp.runtime.app import App
from epp.runtime.options import Options
from epp.scheduling.inflight import InflightLoadProducer
from epp.scheduling.records import AnswerHeaders, Cause, Ended, FirstToken, Placement, TicketId
from tests.data.runtime import picker as runtime
from tests.data.runtime.reloading import Witness, load

W = "{type: witness, parameters: {%s}}"
OUTPUT = "{type: inflight-load-producer, parameters: {addEstimatedOutputTokens: true}}"
LARGE = "{type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 128}}"
REWRITE = "modelRewrites: [{name: r, rules: [{targets: [{modelRewrite: other}]}]}]"
BROKEN = "{name: b, type: witness, parameters: {fails: true}}"
USABLE = (
    "",
    "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]\n",
    f"plugins: [{W % 'colour: red'}, {{type: active-request-scorer}}]\n",
    f"plugins: [{W % 'colour: red, mood: wild'}, {{type: prefix-cache-scorer}}]\n",
    f"plugins: [{W % 'colour: green'}, {{type: active-request-scorer}}, {OUTPUT}]\n",
    f"plugins: [{W % 'colour: red'}, {{type: no-hit-lru-scorer}}, {LARGE}]\n",
    f"plugins: [{{name: witness, type: queue-scorer}}]\nobjectives: [{{name: o, priority: 1}}]\n{REWRITE}\n",
    f"plugins: [{W % 'colour: red'}]\ndataLayer: {{injectDefaults: false}}\n",
)
CONFIGS = (
    *USABLE,
    "plugins: [{type: no-such-type}]\n",
    "plugins: [\n",
    f"plugins: [{W % 'colour: red, mood: sad'}, {BROKEN}]\n",
)

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "tell", "tell", "tell", "pods", "reload", "reload", "release"]),
        st.integers(0, 10_000),
    ),
    max_size=60,
)


@dataclass
class Open:
    """A request in flight. `made`: the remembering plugins it was placed with."""

    ticket: TicketId
    made: list[Any]
    told: int = 0


@dataclass
class Traffic:
    app: App
    open: list[Open] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls) -> "Traffic":
        app = App.assemble(Options(seed=1), load(CONFIGS[2]))
        app.ledger.strict = True
        made = cls(app)
        made.pods(4)
        return made

    def step(self, what: str, choice: int) -> None:
        match what:
            case "place":
                self.place(choice)
            case "tell" if self.open:
                self.tell(self.open[choice % len(self.open)])
            case "pods":
                self.pods(1 + choice % 20)
            case "reload":
                self.reload(CONFIGS[choice % len(CONFIGS)])
            case "release":
                self.app.store.refresh(1.0, 1.0)
                self.app.running.release(self.app.director)
        self.check()

    def place(self, choice: int) -> None:
        body = b'{"model": "m", "prompt": "%s"}' % (b"abc"[choice % 3 :][:1] * (choice % 4000))
        raw = RawRequest(method="POST", path="/v1/completions", headers=(), body=body, request_id="r")
        director = self.app.director
        outcome = director.submit(director.prepare(raw, 1.0), 1.0)
        assert isinstance(outcome, Placement), outcome
        self.open.append(Open(outcome.ticket, self.remembering()))

    def tell(self, request: Open) -> None:
        facts: list[Any] = [
            AnswerHeaders(200, streaming=True, served=""),
            FirstToken(),
            Ended(Cause.NATURAL, None, 1, 1),
        ]
        self.app.director.observe(request.ticket, facts[request.told], 2.0)
        request.told += 1
        if request.told == len(facts):
            self.open.remove(request)

    def pods(self, count: int) -> None:
        self.app.set_endpoints([runtime.endpoint(number) for number in range(1, count + 1)])

    def reload(self, text: str) -> None:
        before = {plugin.name: plugin for plugin in self.app.assembly.loaded.plugins}
        made, assembly = self.app.assembly.named, self.app.assembly
        try:
            self.app.use(load(text))
        except ConfigError:
            assert self.app.assembly is assembly
            return
        for plugin in self.app.assembly.loaded.plugins:
            old = before.get(plugin.name)
            same = old is not None and (old.spec.type, old.params) == (plugin.spec.type, plugin.params)
            if same and plugin.name != self.app.assembly.loaded.handler:
                assert self.app.assembly.named[plugin.name] is made[plugin.name], "a plugin lost its memory"

    def remembering(self) -> list[Any]:
        named = self.app.assembly.named.values()
        found = [made for made in named if isinstance(made, Witness | InflightLoadProducer)]
        self.seen |= {id(made): made for made in found}
        return found

    def check(self) -> None:
        current = self.remembering()
        ledger = self.app.ledger
        assert self.app.director.in_flight == ledger.total_requests == len(self.open)
        assert ledger.overdrafts == 0
        owned = {slot for slot, owner in enumerate(self.app.store.view.endpoints) if owner is not None}
        for made in self.seen.values():
            mine = {request.ticket for request in self.open if made in request.made}
            if isinstance(made, Witness):
                assert made.unknown == [], "told of another's request"
                assert made.open == mine
                if made in current or mine:
                    assert made.owned == owned
            else:
                assert made.in_flight == len(mine)
        for plugin in self.app.assembly.loaded.plugins:
            if plugin.spec.type == "witness":
                witness: Any = self.app.assembly.named[plugin.name]
                assert witness.params == plugin.params

    def finish(self) -> None:
        while self.open:
            self.tell(self.open[0])
        self.app.running.release(self.app.director)
        self.check()
        assert self.app.running._retired == []
        assert not any(runtime.left_over(self.app).values())
        for made in self.seen.values():
            if isinstance(made, InflightLoadProducer):
                assert made.loads() == []


def play(steps: list[Step]) -> None:
    traffic = Traffic.begin()
    for what, choice in steps:
        traffic.step(what, choice)
    traffic.finish()


@settings(max_examples=60)
@given(STEPS)
def test_reloads_under_traffic_lose_nothing(steps: list[Step]) -> None:
    play(steps)


def test_every_usable_configuration_follows_every_other() -> None:
    steps: list[Step] = []
    for first in range(len(USABLE)):
        for second in range(len(USABLE)):
            for choice in (first, second):
                steps += [("reload", choice), ("place", first), ("tell", second), ("tell", 0)]
    play(steps)


# -- faults -----------------------------------------------------------------------------------------


def answers_are_told_to_the_newest_plugins(patch: pytest.MonkeyPatch) -> None:
    observe = Director.observe

    def newest(self: Any, ticket_id: TicketId, fact: Any, now: float) -> Any:
        if (found := self._tickets.get(ticket_id)) is not None:
            self._tickets[ticket_id] = (found[0], found[1], self.plugins)
        return observe(self, ticket_id, fact, now)

    patch.setattr(Director, "observe", newest)


def every_plugin_starts_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(load_module, "_living", lambda plugin, previous, changes: None)


def earlier_plugins_are_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reload_module, "_all_members", lambda assembly, retired: list(assembly.members))


def earlier_plugins_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Director, "follows", lambda self, plugins: True)


def new_plugins_do_not_hear_of_the_present_endpoints(patch: pytest.MonkeyPatch) -> None:
    def use(self: Any, members: Any) -> None:
        self._members = tuple({id(member): member for member in members}.values())

    patch.setattr(reload_module.PluginMembers, "use", use)


def parameters_change_before_all_is_built(patch: pytest.MonkeyPatch) -> None:
    living = load_module._living

    def at_once(plugin: Any, previous: Any, changes: list[Callable[[], None]]) -> Any:
        found = living(plugin, previous, changes)
        for change in changes:
            change()
        return found

    patch.setattr(load_module, "_living", at_once)


def new_parameters_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Witness, "reconfigure", lambda self, params: None)


FAULTS = [
    answers_are_told_to_the_newest_plugins,
    every_plugin_starts_anew,
    earlier_plugins_are_forgotten_at_once,
    earlier_plugins_are_kept_for_ever,
    new_plugins_do_not_hear_of_the_present_endpoints,
    parameters_change_before_all_is_built,
    new_parameters_are_not_told,
]


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def _fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)


@pytest.mark.usefixtures("_fault")
def test_a_fault_is_seen() -> None:
    def sees(steps: list[Step]) -> bool:
        try:
            play(steps)
        except (AssertionError, KeyError):
            return True
        return False

    find(STEPS, sees, settings=settings(max_examples=400, phases=[Phase.generate]))
