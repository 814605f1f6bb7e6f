"""Parsers, and how tokens are estimated, as a file names them."""

from typing import Any

import pytest
import yaml

from epp.config.load import build, load_config
from epp.config.registry import BUILT_INS
from epp.config.spec import Kind, ParserSpec, TokenEstimateSpec
from epp.errors import ConfigError
from epp.payload.apis import DEFAULT_PARSER_TYPES, PARSERS, ParserSet
from epp.payload.estimate import Estimate, VideoHints
from epp.payload.render import ExactTokens
from epp.pool.store import PoolStore

HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def assembled(*plugins: Any, parsers: tuple[str, ...] = ()) -> tuple[dict[str, Any], ParserSet]:
    """What the file's plugins became, and the parsers in use."""
    text = yaml.safe_dump(
        {
            **HEAD,
            "plugins": [*plugins, {"type": "queue-scorer"}],
            "requestHandler": {"parsers": [{"pluginRef": name} for name in parsers]},
        }
    )
    assembly = build(load_config(text, "file"), PoolStore().view, b"secret")
    return dict(assembly.named), assembly.plugins.parsers


def test_every_parser_is_a_type_without_parameters() -> None:
    specs = {spec.type: spec for spec in BUILT_INS if spec.kind is Kind.PARSER}
    assert set(specs) == set(PARSERS)
    for name in PARSERS:
        named, _ = assembled({"type": name, "name": "mine"}, parsers=("mine",))
        assert named["mine"] == ParserSpec(name)


def test_a_list_of_parsers_is_all_there_is() -> None:
    plugins = [{"type": "sglanghttp-parser", "name": "mine"}, {"type": "anthropic-parser"}]
    _, parsers = assembled(*plugins, parsers=("mine", "anthropic-parser"))
    assert parsers.types == ("sglanghttp-parser", "anthropic-parser")
    assert parsers.find("/v1/chat/completions") is None
    assert assembled()[1].types == DEFAULT_PARSER_TYPES


@pytest.mark.parametrize("name", ["token-producer", "tokenizer"])
def test_the_estimate_reaches_the_parsers(name: str) -> None:
    parameters = {
        "estimate": {
            "image": {"mode": "static", "static": {"staticToken": 256}},
            "video": {
                "maxVideoTokens": 100,
                "defaultDuration": 3,
                "defaultResolution": {"width": 32, "height": 32},
                "tokensPerFrame": {"dynamic": {"factor": 64}},
                "frames": {"maxFrames": 4, "sampled": {"sampleFPS": 1.5, "temporalPatchSize": 2}},
            },
        }
    }
    named, parsers = assembled({"type": name, "parameters": parameters})
    assert named[name] == TokenEstimateSpec(parsers.estimate)
    assert parsers.estimate.image.tokens((10, 10)) == 256
    assert parsers.estimate.video.tokens(VideoHints()) == 4 // 2 * 16
    assert assembled()[1].estimate == Estimate()


def test_the_field_for_another_backend_is_not_there_yet() -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        assembled({"type": "tokenizer", "parameters": {"udsTokenizerConfig": {}}})


def test_vllm_counts_tokens_exactly() -> None:
    vllm = {"url": "https://render:8443/", "timeout": "2s", "mmTimeout": "1m"}
    named, _ = assembled({"type": "token-producer", "parameters": {"modelName": "base", "vllm": vllm}})
    exact = ExactTokens("https://render:8443", "base", 2.0, 60.0)
    assert named["token-producer"] == TokenEstimateSpec(Estimate(), exact)


@pytest.mark.parametrize("parameters", [{"modelName": "m"}, {"modelName": "m", "vllm": {}}])
def test_a_model_name_alone_is_rendered_by_the_service_beside_the_picker(parameters: dict[str, Any]) -> None:
    named, _ = assembled({"type": "token-producer", "parameters": parameters})
    spec = named["token-producer"]
    assert isinstance(spec, TokenEstimateSpec)
    assert spec.exact == ExactTokens("http://localhost:8000", "m", 5.0, 30.0)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"vllm": {}}, "vllm needs modelName"),
        ({"modelName": "m", "vllm": {"url": "render:8000"}}, "is not http://host:port"),
        ({"modelName": "m", "vllm": {"url": "http://render/?a=b"}}, "is not http://host:port"),
        ({"modelName": "m", "vllm": {"url": "http://[render"}}, "is not http://host:port"),
        ({"modelName": "m", "vllm": {"url": "http://render:x"}}, "is not http://host:port"),
        ({"modelName": "m", "vllm": {"timeout": "0s"}}, "timeout must be above 0"),
        ({"modelName": "m", "vllm": {"mmTimeout": "0s"}}, "mmTimeout must be above 0"),
        ({"modelName": "m", "vllm": {"http": "http://render"}}, "unknown field"),
    ],
)
def test_a_render_service_that_cannot_be_used_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assembled({"type": "token-producer", "parameters": parameters})
