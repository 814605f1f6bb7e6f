"""Request APIs as one table, and the choice among them by path."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import Final

import msgspec

from epp import names
from epp.errors import BadRequest
from epp.payload import anthropic, generate, grpc, openai, vertex
from epp.payload.body import Span
from epp.payload.estimate import Estimate
from epp.payload.media import Media
from epp.payload.records import Api, InferenceRequest
from epp.payload.vertex import Envelope

Reader = Callable[[Api, bytes, Media], tuple[InferenceRequest, Span | None]]
"""Reads an inflated body of the API; raises BadRequest. The span is that of the model's JSON value."""


class ErrorShape(StrEnum):
    """How an error is told in an API."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    SGLANG = "sglang"
    GRPC = "grpc"


class Dialect(msgspec.Struct, frozen=True):
    """What sets an API apart.

    Attributes:
        suffixes: ends of the paths it is served at, from a segment's start; those of a gRPC service
            that is named without its package also behind one.
        whole_path: a suffix must be all of the path.
        read: None = the body is not looked at.
        needs_model: a request without a model, and without one from elsewhere, is refused.
        rewrites_model: another model can be put into the body.
        envelope: what the body to be read is carried in; None: it comes as it is.
    """

    api: Api
    suffixes: tuple[str, ...]
    read: Reader | None
    shape: ErrorShape = ErrorShape.OPENAI
    whole_path: bool = False
    needs_model: bool = True
    rewrites_model: bool = True
    envelope: Envelope | None = None


def _grpc_generate(_: Api, plain: bytes, __: Media) -> tuple[InferenceRequest, Span | None]:
    return grpc.read_generate(plain), None


def _grpc_embed(_: Api, plain: bytes, __: Media) -> tuple[InferenceRequest, Span | None]:
    return grpc.read_embed(plain), None


_VLLM_SERVICE: Final = "vllm.grpc.engine.VllmEngine"

_TABLE: Final = (
    Dialect(Api.CHAT, ("chat/completions",), openai.read_chat),
    Dialect(Api.COMPLETIONS, ("completions",), openai.read_completions),
    Dialect(Api.EMBEDDINGS, ("embeddings",), openai.read_embeddings),
    Dialect(Api.RESPONSES, ("responses",), openai.read_responses),
    # The API has no model; an engine that wants one gets what the client sent.
    Dialect(Api.CONVERSATIONS, ("conversations",), openai.read_conversations, needs_model=False),
    Dialect(Api.CHAT_RENDER, ("chat/completions/render",), openai.read_chat),
    Dialect(Api.COMPLETIONS_RENDER, ("completions/render",), openai.read_completions),
    Dialect(Api.IMAGES, ("images/generations",), openai.read_images),
    Dialect(Api.MESSAGES, ("messages",), anthropic.read_messages, ErrorShape.ANTHROPIC),
    Dialect(
        Api.COUNT_TOKENS,
        ("messages/count_tokens",),
        anthropic.read_count_tokens,
        ErrorShape.ANTHROPIC,
        needs_model=False,
    ),
    Dialect(Api.VLLM_GENERATE, ("inference/v1/generate",), generate.read_vllm),
    Dialect(
        Api.SGLANG_GENERATE,
        ("generate",),
        generate.read_sglang,
        ErrorShape.SGLANG,
        whole_path=True,
        needs_model=False,
        rewrites_model=False,
    ),
    Dialect(
        Api.VLLM_GRPC_GENERATE,
        (f"{_VLLM_SERVICE}/Generate",),
        _grpc_generate,
        ErrorShape.GRPC,
        needs_model=False,
        rewrites_model=False,
    ),
    Dialect(
        Api.VLLM_GRPC_EMBED,
        (f"{_VLLM_SERVICE}/Embed",),
        _grpc_embed,
        ErrorShape.GRPC,
        needs_model=False,
        rewrites_model=False,
    ),
    *(
        # Errors have OpenAI's shape, as what is carried has. An endpoint of Vertex is of one model, so that
        # its clients need not name it.
        Dialect(api, (f"{vertex.SERVICE}/{method}",), read, needs_model=False, envelope=Envelope(method))
        for api, method, read in (
            (Api.VERTEX_CHAT_COMPLETIONS, "ChatCompletions", openai.read_chat),
            (Api.VERTEX_STREAM_RAW_PREDICT, "StreamRawPredict", openai.read_responses),
            (Api.VERTEX_RAW_PREDICT, "RawPredict", openai.read_responses),
        )
    ),
    Dialect(Api.PASSTHROUGH, (), None, needs_model=False, rewrites_model=False),
)

DIALECTS: Final[Mapping[Api, Dialect]] = MappingProxyType({dialect.api: dialect for dialect in _TABLE})
PASSTHROUGH: Final = DIALECTS[Api.PASSTHROUGH]


class ParserType(msgspec.Struct, frozen=True):
    """A parser: the APIs it reads, and the gRPC service whose other methods it lets pass unread.

    `protocols`: those of a pool (`appProtocol`) that such requests can be sent over.
    """

    apis: tuple[Api, ...]
    service: str = ""
    protocols: tuple[str, ...] = (names.HTTP_PROTOCOL, names.H2C_PROTOCOL)


PARSERS: Final[Mapping[str, ParserType]] = MappingProxyType(
    {
        "openai-parser": ParserType(
            (
                Api.CHAT,
                Api.COMPLETIONS,
                Api.EMBEDDINGS,
                Api.RESPONSES,
                Api.CONVERSATIONS,
                Api.CHAT_RENDER,
                Api.COMPLETIONS_RENDER,
                Api.IMAGES,
            )
        ),
        "anthropic-parser": ParserType((Api.MESSAGES, Api.COUNT_TOKENS)),
        "vllmhttp-parser": ParserType((Api.VLLM_GENERATE,)),
        "sglanghttp-parser": ParserType((Api.SGLANG_GENERATE,)),
        "vllmgrpc-parser": ParserType(
            (Api.VLLM_GRPC_GENERATE, Api.VLLM_GRPC_EMBED), _VLLM_SERVICE, (names.H2C_PROTOCOL,)
        ),
        "vertexai-parser": ParserType(tuple(vertex.CARRIED), vertex.SERVICE, (names.H2C_PROTOCOL,)),
        "passthrough-parser": ParserType((Api.PASSTHROUGH,)),
    }
)

DEFAULT_PARSER_TYPES: Final = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")

_SHOWN_CHARACTERS = 200
_USUAL_STARTS: Final = ("/", "/v1/", *(f"/{package}." for package in vertex.PACKAGES))


class ParserSet:
    """The parsers that are in use, and how they estimate. Their order does not matter.

    Immutable, and small on the way to another process.

    Attributes:
        types: of the parsers, as given.
    """

    __slots__ = ("_by_path", "_by_suffix", "_deepest", "_rest", "_services", "_whole", "estimate", "types")

    def __init__(self, types: Iterable[str], estimate: Estimate = Estimate()) -> None:  # noqa: B008
        """Raises KeyError: there is no parser of that type."""
        self.types = tuple(types)
        self.estimate = estimate
        parsers = [PARSERS[each] for each in self.types]
        apis = chain.from_iterable(parser.apis for parser in parsers)
        known = [(suffix, DIALECTS[api]) for api in apis for suffix in DIALECTS[api].suffixes]
        self._by_suffix = {suffix: dialect for suffix, dialect in known if not dialect.whole_path}
        self._whole = {suffix: dialect for suffix, dialect in known if dialect.whole_path}
        self._services = frozenset(parser.service for parser in parsers if parser.service)
        self._rest = PASSTHROUGH if "passthrough-parser" in self.types else None
        self._deepest = max((suffix.count("/") + 1 for suffix in self._by_suffix), default=0)
        usual = (f"{start}{suffix}" for suffix, _ in known for start in _USUAL_STARTS)
        self._by_path = {path: found for path in usual if (found := self._find(path)) is not None}

    def __reduce__(self) -> tuple[type["ParserSet"], tuple[tuple[str, ...], Estimate]]:
        return ParserSet, (self.types, self.estimate)

    @property
    def protocols(self) -> frozenset[str]:
        """Values of a pool's `appProtocol` under which some of the parsers have something to read."""
        return frozenset(chain.from_iterable(PARSERS[each].protocols for each in self.types))

    def find(self, path: str) -> Dialect | None:
        """As `dialect_of`; None where that refuses."""
        return self._by_path.get(path) or self._find(path)

    def dialect_of(self, path: str) -> Dialect:
        """The API with the longest suffix that the path has; query and trailing slash do not count.

        Raises:
            BadRequest: no API has one, and no parser lets other paths pass.
        """
        found = self._by_path.get(path) or self._find(path)
        if found is None:
            shown = path.partition("?")[0][:_SHOWN_CHARACTERS]
            raise BadRequest(
                f"no parser registered matching path suffix for: {shown}; what is served here ends in "
                f"{self._served()}"
            )
        return found

    def _find(self, path: str) -> Dialect | None:
        bare = path.partition("?")[0].rstrip("/")
        if (found := self._whole.get(bare.removeprefix("/"))) is not None:
            return found
        segments = bare.split("/")
        for count in range(self._deepest, 0, -1):
            if (found := self._by_suffix.get("/".join(segments[-count:]))) is not None:
                return found
        return self._of_service(*segments[-2:]) if len(segments) > 1 else self._rest

    def _of_service(self, qualified: str, method: str) -> Dialect | None:
        """Of what may be a method of a gRPC service: ours are known with their package, or in any."""
        service = qualified.rpartition(".")[2]
        if self._services.isdisjoint((qualified, service)):
            return self._rest
        return self._by_suffix.get(f"{service}/{method}", PASSTHROUGH)

    def _served(self) -> str:
        listed = sorted([*self._by_suffix, *(f"/{path}" for path in self._whole)])
        return ", ".join(listed)


DEFAULT_PARSERS: Final = ParserSet(DEFAULT_PARSER_TYPES)
