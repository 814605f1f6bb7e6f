"""Types of parsers."""

from functools import partial
from typing import Final

from epp.config.schema import NoParameters
from epp.config.spec import BuildContext, Kind, ParserSpec, PluginSpec, Stability
from epp.payload.apis import PARSERS


def _parser(type_name: str, context: BuildContext, params: NoParameters) -> ParserSpec:
    return ParserSpec(type_name)


BUILT_INS: Final[tuple[PluginSpec, ...]] = tuple(
    PluginSpec(name, Kind.PARSER, NoParameters, partial(_parser, name), Stability.STABLE) for name in PARSERS
)
