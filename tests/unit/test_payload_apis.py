"""The table of request APIs, and which of them a path belongs to."""

import itertools
import json
import pickle

import pytest

from epp.errors import BadRequest, PayloadTooLarge
from epp.payload.apis import DEFAULT_PARSER_TYPES, DEFAULT_PARSERS, DIALECTS, PARSERS, ParserSet
from epp.payload.estimate import Estimate, ImageEstimate
from epp.payload.records import Api, RawRequest
from epp.payload.request import Parsed, parse_request, rewrite_model
from epp.payload.shapes import SHAPES
from epp.payload.vertex import CARRIED

ALL = ParserSet(PARSERS)
SERVICE = "vllm.grpc.engine.VllmEngine"
VERTEX = "PredictionService"


def parse(body: bytes, path: str, parsers: ParserSet = DEFAULT_PARSERS, method: str = "POST") -> Parsed:
    return parse_request(RawRequest("id", method, path, (), body), max_bytes=1000, parsers=parsers)


def ends_in(path: str, suffix: str) -> bool:
    """At a segment's start; what begins with a service's name without its package also behind a dot."""
    return f"/{path}".endswith((f"/{suffix}", f".{suffix}" if suffix.startswith(VERTEX) else f"/{suffix}"))


def slow_api_of(path: str, types: tuple[str, ...]) -> Api | None:
    """Every suffix tried against the path, the longest kept."""
    bare = path.split("?")[0].rstrip("/")
    found = [
        (len(suffix), api)
        for kind in types
        for api in PARSERS[kind].apis
        for suffix in DIALECTS[api].suffixes
        if (bare.strip("/") == suffix if DIALECTS[api].whole_path else ends_in(bare, suffix))
    ]
    if found:
        return max(found)[1]
    services = [PARSERS[kind].service for kind in types if PARSERS[kind].service]
    if any(ends_in(bare.rpartition("/")[0], service) for service in services):
        return Api.PASSTHROUGH
    return Api.PASSTHROUGH if "passthrough-parser" in types else None


# -- the table -----------------------------------------------------------------------------------------


def test_every_api_has_a_row_and_a_parser() -> None:
    assert set(DIALECTS) == set(Api)
    assert sorted(itertools.chain(*(parser.apis for parser in PARSERS.values()))) == sorted(Api)
    suffixes = [suffix for dialect in DIALECTS.values() for suffix in dialect.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    assert all(dialect.suffixes for api, dialect in DIALECTS.items() if api is not Api.PASSTHROUGH)


def test_what_sets_apis_apart() -> None:
    assert {api for api, shape in SHAPES.items() if not shape.read} == {Api.COUNT_TOKENS, Api.PASSTHROUGH}
    without_model = {Api.SGLANG_GENERATE, Api.VLLM_GRPC_GENERATE, Api.VLLM_GRPC_EMBED, Api.PASSTHROUGH}
    assert {api for api in Api if not DIALECTS[api].rewrites_model} == without_model
    assert {api for api in Api if not DIALECTS[api].needs_model} == {
        *without_model,
        *CARRIED,
        Api.CONVERSATIONS,
        Api.COUNT_TOKENS,
    }
    assert {api for api in Api if DIALECTS[api].envelope is not None} == set(CARRIED)


# -- paths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/v1/chat/completions/", Api.CHAT),
        ("/v1/chat/completions?api-version=2/completions", Api.CHAT),
        ("chat/completions", Api.CHAT),
        ("/chat/completions", Api.CHAT),
        ("/openai/deployments/x/chat/completions", Api.CHAT),
        ("/v1/projects/p/locations/l/endpoints/e/chat/completions", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/completions?x=/chat/completions", Api.COMPLETIONS),
        ("/v1/chat/completions/render", Api.CHAT_RENDER),
        ("/v1/completions/render/", Api.COMPLETIONS_RENDER),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1beta/responses", Api.RESPONSES),
        ("/v1/conversations", Api.CONVERSATIONS),
        ("/v1/images/generations", Api.IMAGES),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/messages/count_tokens?beta=true", Api.COUNT_TOKENS),
        ("/inference/v1/generate", Api.VLLM_GENERATE),
        ("/x/inference/v1/generate", Api.VLLM_GENERATE),
        ("/generate", Api.PASSTHROUGH),
        (f"/{SERVICE}/Generate", Api.PASSTHROUGH),
        ("/v1/chat/completions/batch", Api.PASSTHROUGH),
        ("/v1/messages/render", Api.PASSTHROUGH),
        ("/v1/responses/resp_1", Api.PASSTHROUGH),
        ("/v1/mycompletions", Api.PASSTHROUGH),
        ("/v1/completions/x", Api.PASSTHROUGH),
        ("/v1/Chat/Completions", Api.PASSTHROUGH),
        ("/v1/models", Api.PASSTHROUGH),
        ("/", Api.PASSTHROUGH),
        ("", Api.PASSTHROUGH),
        ("*", Api.PASSTHROUGH),
    ],
)
def test_api_is_the_longest_known_suffix(path: str, api: Api) -> None:
    assert DEFAULT_PARSERS.dialect_of(path).api is api


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/generate", Api.SGLANG_GENERATE),
        ("generate/?x=1", Api.SGLANG_GENERATE),
        ("/v1/generate", Api.PASSTHROUGH),
        ("/inference/v1/generate", Api.VLLM_GENERATE),
        (f"/{SERVICE}/Generate", Api.VLLM_GRPC_GENERATE),
        (f"/{SERVICE}/Embed", Api.VLLM_GRPC_EMBED),
        (f"/{SERVICE}/HealthCheck", Api.PASSTHROUGH),
        ("/google.cloud.aiplatform.v1.PredictionService/ChatCompletions", Api.VERTEX_CHAT_COMPLETIONS),
        (
            "/google.cloud.aiplatform.v1beta1.PredictionService/StreamRawPredict",
            Api.VERTEX_STREAM_RAW_PREDICT,
        ),
        ("/PredictionService/RawPredict", Api.VERTEX_RAW_PREDICT),
        ("/google.cloud.aiplatform.v1.PredictionService/Predict", Api.PASSTHROUGH),
        ("/google.cloud.aiplatform.v1.MyPredictionService/RawPredict", Api.PASSTHROUGH),
    ],
)
def test_all_parsers_take(path: str, api: Api) -> None:
    assert ALL.dialect_of(path).api is api


def test_only_sglangs_whole_path_is_its_own() -> None:
    parsers = ParserSet(("sglanghttp-parser",))
    assert parsers.dialect_of("/generate").api is Api.SGLANG_GENERATE
    for path in ("/v1/generate", "/inference/v1/generate", "/generate/x"):
        assert parsers.find(path) is None


def test_other_methods_of_the_service_pass_unread() -> None:
    parsers = ParserSet(("vllmgrpc-parser",))
    assert parsers.dialect_of(f"/{SERVICE}/GetModelInfo").api is Api.PASSTHROUGH
    assert parsers.find(f"/{SERVICE}") is None
    assert parsers.find("/grpc.health.v1.Health/Check") is None


PATHS = [
    start + suffix + end
    for dialect in DIALECTS.values()
    for suffix in (*dialect.suffixes, "models", "render", f"{SERVICE}/Abort", f"{VERTEX}/Predict")
    for start in ("", "/", "/v1/", "/a/b/", "/v1", "/a.b.")
    for end in ("", "/", "?q=/responses", "/x")
]


@pytest.mark.parametrize("count", range(1, 4))
def test_the_longest_suffix_counts_whatever_the_order(count: int) -> None:
    for types in itertools.combinations(PARSERS, count):
        orders = [ParserSet(order) for order in itertools.permutations(types)]
        for path in PATHS:
            expected = slow_api_of(path, types)
            for parsers in orders:
                found = parsers.find(path)
                assert (found and found.api) == expected, (path, types)


def shortest_first(parsers: ParserSet) -> None:
    parsers._deepest = 1


def any_end(parsers: ParserSet) -> None:
    parsers._whole, parsers._by_suffix = {}, {**parsers._by_suffix, **parsers._whole}


def no_fallback(parsers: ParserSet) -> None:
    parsers._rest = None


@pytest.mark.parametrize("fault", [shortest_first, any_end, no_fallback])
def test_faults_are_caught(fault: object) -> None:
    parsers = ParserSet(PARSERS)
    parsers._by_path = {}
    assert all(
        (found := parsers.find(path)) and found.api is slow_api_of(path, tuple(PARSERS)) for path in PATHS
    )
    assert callable(fault)
    fault(parsers)
    assert not all(
        (found := parsers.find(path)) and found.api is slow_api_of(path, tuple(PARSERS)) for path in PATHS
    )


# -- sets ----------------------------------------------------------------------------------------------


def test_default_list_is_the_fields() -> None:
    assert DEFAULT_PARSER_TYPES == (
        "openai-parser",
        "anthropic-parser",
        "vllmhttp-parser",
        "passthrough-parser",
    )
    assert DEFAULT_PARSERS.types == DEFAULT_PARSER_TYPES


def test_a_set_travels_as_its_names() -> None:
    parsers = ParserSet(("vllmhttp-parser",), Estimate(image=ImageEstimate(mode="static")))
    sent = pickle.dumps(parsers)
    again = pickle.loads(sent)
    assert (again.types, again.estimate) == (parsers.types, parsers.estimate)
    assert again.dialect_of("/inference/v1/generate").api is Api.VLLM_GENERATE
    assert again.find("/v1/completions") is None
    assert len(sent) < 2000


def test_an_unknown_parser_is_an_error() -> None:
    with pytest.raises(KeyError):
        ParserSet(("other-parser",))


def test_a_path_that_no_parser_takes_is_refused() -> None:
    parsers = ParserSet(("anthropic-parser", "sglanghttp-parser"))
    with pytest.raises(BadRequest) as refused:
        parse(b"{}", "/v1/completions?x=secret", parsers)
    assert refused.value.message == (
        "no parser registered matching path suffix for: /v1/completions; what is served here ends in "
        "/generate, messages, messages/count_tokens"
    )
    with pytest.raises(BadRequest) as refused:
        parse(b"{}", "/" + "x" * 5000, parsers)
    assert len(refused.value.message) < 400
    with pytest.raises(PayloadTooLarge):
        parse(b"x" * 1001, "/x", parsers)


def test_without_a_body_to_read_no_parser_is_asked_for_it() -> None:
    parsers = ParserSet(("anthropic-parser",))
    assert parse(b"", "/v1/models", parsers, "GET").request.api is Api.PASSTHROUGH
    hidden = RawRequest("id", "POST", "/v1/messages", (), b"", body_shown=False)
    assert parse_request(hidden, max_bytes=10, parsers=parsers).request.api is Api.MESSAGES


def test_passthrough_alone_reads_nothing() -> None:
    parsers = ParserSet(("passthrough-parser",))
    for path in ("/v1/chat/completions", "/generate", f"/{SERVICE}/Generate"):
        body = b"not json"
        parsed = parse(body, path, parsers)
        assert parsed.request.api is Api.PASSTHROUGH
        assert rewrite_model(parsed, "other").body is body


def test_grpc_bodies_are_read_by_their_parser() -> None:
    with pytest.raises(BadRequest):
        parse(b"\x01", f"/{SERVICE}/Generate", ALL)
    with pytest.raises(BadRequest):
        parse(b"\x01", f"/{SERVICE}/Embed", ALL)
    body = b"\x00\x00\x00\x00\x02\x12\x00"
    for path in (f"/{SERVICE}/HealthCheck", "/x"):
        assert parse(body, path, ALL).request.api is Api.PASSTHROUGH


@pytest.mark.parametrize("api", [api for api in Api if DIALECTS[api].rewrites_model and api not in CARRIED])
def test_a_model_can_be_put_in(api: Api) -> None:
    members = {
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "items": [{"role": "user", "content": "a"}],
        "token_ids": [1],
    }
    path = "/" + DIALECTS[api].suffixes[0]
    for named in ({**members, "model": "old"}, members):
        parsed = parse(json.dumps(named).encode(), path)
        assert (parsed.request.api, parsed.request.model) == (api, named.get("model", ""))
        rewritten = rewrite_model(parsed, "new").body
        assert json.loads(rewritten) == {**members, "model": "new"}
        assert parse(rewritten, path).request.prompts == parsed.request.prompts
