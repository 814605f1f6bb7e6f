"""Configurations to change between, and a plugin of another package that tells what it hears."""

from collections.abc import Callable
from typing import Any

import numpy as np

from epp.config.load import load_config
from epp.config.loaded import LoadedConfig
from epp.config.registry import Registry, built_in_registry
from epp.config.spec import BuildContext, Kind, Parameters, PluginSpec, Stability
from epp.pool.records import Floats, Mask
from epp.scheduling.ports import Ctx
from epp.scheduling.records import AnswerFact, Ended, Ticket, TicketId

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


class WitnessParams(Parameters, frozen=True):
    """`colour` shapes what it remembers, `mood` does not."""

    colour: str = "red"
    mood: str = "calm"
    fails: bool = False


class Witness:
    """A scorer that remembers who owns slots and which requests are open."""

    def __init__(self, context: BuildContext, params: WitnessParams) -> None:
        if params.fails:
            raise OSError("out of paint")
        self.params = params
        self.owned: set[int] = set()
        self.open: set[TicketId] = set()
        self.unknown: list[TicketId] = []

    def reconfigure(self, params: WitnessParams) -> None:
        self.params = params

    def score(self, ctx: Ctx, alive: Mask) -> Floats:
        return np.zeros(len(alive))

    def placed(self, ctx: Ctx, ticket: Ticket) -> None:
        self.open.add(ticket.id)

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> None:
        if ticket.id not in self.open:
            self.unknown.append(ticket.id)
        if isinstance(fact, Ended):
            self.open.discard(ticket.id)

    def joined(self, slot: int) -> None:
        assert slot not in self.owned, "told twice"
        self.owned.add(slot)

    def left(self, slot: int) -> None:
        self.owned.remove(slot)


WITNESS = PluginSpec(
    "witness", Kind.SCORER, WitnessParams, Witness, Stability.STABLE, state_parameters=("colour", "fails")
)


def registry() -> Registry:
    """The built-in types and `witness`."""
    own = built_in_registry()
    offers: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "witness": [("tests:WITNESS", lambda: WITNESS)]
    }
    return Registry(own.specs, own.not_yet, lambda name: offers.get(name, []), lambda: offers)


def load(text: str) -> LoadedConfig:
    """Raises ConfigError where `text`, which follows the head, cannot be used."""
    return load_config(HEAD + text, "config.yaml", registry())


def witness(assembly: Any, name: str = "witness") -> Witness:
    found: Witness = assembly.named[name]
    return found
