"""`request-attribute-reporter`: what it computes, and how it fails."""

import sys
from typing import Any

import msgspec
import pytest

from epp.config.load import build, load_config
from epp.errors import ConfigError
from epp.payload.records import Usage
from epp.pool.store import PoolStore
from epp.scheduling.reporter import (
    Attribute,
    AttributeKey,
    RequestAttributeReporter,
    RequestAttributeReporterParams,
)

TICKET: Any = None
USAGE = Usage(32, 10, 8)
EITHER = "(has(usage.prompt_tokens) ? usage.prompt_tokens : 0)"
OTHER = "(has(usage.completion_tokens) ? usage.completion_tokens : 0)"


def reporter(expression: str, condition: str = "", **key: str) -> RequestAttributeReporter:
    attribute = Attribute(AttributeKey(**{"name": "x-cost", **key}), expression, condition)
    return RequestAttributeReporter(RequestAttributeReporterParams((attribute,)))


def figure(expression: str, usage: Usage | None = USAGE, condition: str = "") -> float | None:
    told = reporter(expression, condition).report(TICKET, usage)
    if told is None:
        return None
    ((namespace, key, value),) = told
    assert (namespace, key) == ("envoy.lb", "x-cost")
    return value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("usage.completion_tokens", 10.0),
        ("usage.prompt_tokens + usage.completion_tokens", 42.0),
        ("usage.total_tokens", 42.0),
        ("usage.prompt_token_details.cached_tokens", 8.0),
        ("usage.prompt_tokens * 0.5 + usage.completion_tokens * 2.0", 36.0),
        ("usage.prompt_tokens / 3.0", 10.0),
        ("-usage.prompt_tokens / 3.0", -10.0),
        ("int(usage.total_tokens) / 4", 10.0),
        ("7", 7.0),
        (f"{EITHER} + {OTHER}", 42.0),
        ("usage.prompt_tokens > 100.0 ? 2 : 1", 1.0),
    ],
)
def test_figures(expression: str, value: float) -> None:
    assert figure(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["0", "usage.prompt_tokens - 32.0", "0.9", "-1", "-1.7", "1.0 / 0.0", "0.0 / 0.0"],
)
def test_figures_that_are_not_reported(expression: str) -> None:
    assert figure(expression) is None


@pytest.mark.parametrize(
    ("condition", "reports"),
    [
        ("has(usage.completion_tokens)", True),
        ("has(usage.prompt_tokens) && has(usage.completion_tokens)", True),
        ("usage.completion_tokens > 10.0", False),
        ("has(usage.nothing)", False),
        ("1", False),
        ("'true'", False),
    ],
)
def test_conditions(condition: str, reports: bool) -> None:
    assert figure("usage.total_tokens", condition=condition) == (42.0 if reports else None)


def test_an_answer_without_usage_counts_as_zeros() -> None:
    assert figure("usage.total_tokens", None) is None
    assert figure("7", None, "has(usage.total_tokens)") == 7.0
    assert figure("has(usage.prompt_token_details) ? 2 : 3", Usage(1, 1)) == 3.0


def test_where_the_figure_goes() -> None:
    assert reporter("1", namespace="billing", name="cost").report(TICKET, USAGE) == (
        ("billing", "cost", 1.0),
    )
    assert reporter("1", namespace="").report(TICKET, USAGE) == (("envoy.lb", "x-cost", 1.0),)


@pytest.mark.parametrize(
    ("expression", "condition", "says"),
    [
        ("usage.nothing", "", "failed to evaluate expression: .*nothing"),
        ("usage.total_tokens * 2", "", "failed to evaluate expression: .*overload"),
        ("1", "usage.nothing > 1.0", "failed to evaluate condition"),
        ("'text'", "", "expression gives str"),
        ("true", "", "expression gives bool"),
    ],
)
def test_what_fails_on_an_answer_says_why(expression: str, condition: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reporter(expression, condition).report(TICKET, USAGE)


@pytest.mark.parametrize(
    ("expression", "condition", "says"),
    [
        ("usage.", "", "failed to compile expression: .*Syntax error"),
        ("usages.total_tokens", "", "failed to compile expression: .*undeclared reference to 'usages"),
        ("'a' + 1", "", "failed to compile expression: .*no matching overload"),
        ("1", "&&", "failed to compile condition"),
        ("", "", "expression cannot be empty"),
    ],
)
def test_what_is_no_cel_is_refused_at_the_start(expression: str, condition: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        reporter(expression, condition)


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_attribute(count: int) -> None:
    attribute = Attribute(AttributeKey("x"), "1")
    with pytest.raises(ValueError, match="attributes must contain exactly one entry"):
        RequestAttributeReporter(RequestAttributeReporterParams((attribute,) * count))


def test_the_key_has_a_name() -> None:
    with pytest.raises(ValueError, match="name cannot be empty"):
        reporter("1", name="")


def configured(parameters: dict[str, Any]) -> Any:
    text = msgspec.yaml.encode(
        {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                {"type": "request-attribute-reporter", "name": "cost", "parameters": parameters},
                {"type": "max-score-picker"},
            ],
            "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "max-score-picker"}]}],
        }
    )
    return build(load_config(text, "config.yaml"), PoolStore(staleness_s=2.0).view, b"secret").named["cost"]


KEY = {"namespace": "envoy.lb", "name": "x-gateway-inference-request-cost"}


def test_from_a_file() -> None:
    made = configured(
        {
            "attributes": [
                {
                    "key": KEY,
                    "expression": "usage.completion_tokens\n",
                    "condition": "has(usage.completion_tokens)",
                }
            ]
        }
    )
    assert made.report(TICKET, USAGE) == (("envoy.lb", "x-gateway-inference-request-cost", 10.0),)


def test_a_file_with_wrong_cel_is_refused_by_plugin_and_line() -> None:
    with pytest.raises(ConfigError, match=r"cost failed to start: .*failed to compile expression"):
        configured({"attributes": [{"key": KEY, "expression": "usage."}]})


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    with pytest.raises(ConfigError, match=r"cost failed to start: .*pip install 'warmroute\[cel\]'"):
        configured({"attributes": [{"key": KEY, "expression": "1"}]})


# -- faults that these tests must see ------------------------------------------------------------------


def _three_figures() -> None:
    test_figures("usage.total_tokens", 42.0)
    test_figures("usage.prompt_tokens * 1.0", 32.0)
    test_figures("usage.completion_tokens", 10.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"total_tokens": 42},
        {"completion_tokens": 10.0, "prompt_tokens": 32.0, "total_tokens": 32.0},
        {"completion_tokens": 32.0, "prompt_tokens": 10.0, "total_tokens": 42.0},
    ],
)
def test_wrong_fields_are_seen(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.scheduling.reporter._fields", lambda usage: fields)
    with pytest.raises((AssertionError, ValueError)):
        _three_figures()
