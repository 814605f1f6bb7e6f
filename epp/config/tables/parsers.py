"""Types of parsers."""

from typing import Final

from epp.config.spec import Kind, KnownType, PluginSpec

BUILT_INS: Final[tuple[PluginSpec, ...]] = ()

LATER: Final[tuple[KnownType, ...]] = (
    KnownType("openai-parser", Kind.PARSER),
    KnownType("anthropic-parser", Kind.PARSER),
    KnownType("vllmhttp-parser", Kind.PARSER),
    KnownType("sglanghttp-parser", Kind.PARSER),
    KnownType("vllmgrpc-parser", Kind.PARSER),
    KnownType("vertexai-parser", Kind.PARSER),
    KnownType("passthrough-parser", Kind.PARSER),
)
