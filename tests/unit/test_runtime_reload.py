"""The configuration in use: what another one changes, what goes on, what has to wait."""

from random import Random
from typing import Any

import pytest
import yaml

from epp.config.load import default_config, load_config
from epp.errors import ConfigError
from epp.kvcache.approximate import ApproximatePrefixProducer
from epp.payload.records import RawRequest
from epp.payload.rewrite import ModelRewrite, RewriteRule, RewriteTarget
from epp.runtime.app import App
from epp.runtime.options import Options
from epp.runtime.reload import PluginMembers, Policies
from epp.scheduling.records import Cause, Ended, Placement
from epp.scheduling.scorers import KvCacheUtilizationScorer
from tests.data.runtime import picker as runtime
from tests.data.runtime import reloading
from tests.data.runtime.reloading import load, witness

PREFIX = "approx-prefix-cache-producer"
BODY = b'{"model": "m", "prompt": "%s"}'


def picker(text: str = "", endpoints: int = 3) -> App:
    app = App.assemble(Options(seed=1), load(text))
    app.set_endpoints([runtime.endpoint(number) for number in range(1, endpoints + 1)])
    return app


def place(app: App, headers: tuple[tuple[str, str], ...] = (), prompt: bytes = b"a" * 4000) -> Placement:
    raw = RawRequest(
        method="POST", path="/v1/completions", headers=headers, body=BODY % prompt, request_id="r"
    )
    outcome = app.director.submit(app.director.prepare(raw, 1.0), 1.0)
    assert isinstance(outcome, Placement)
    return outcome


def end(app: App, placement: Placement) -> None:
    app.director.observe(placement.ticket, Ended(Cause.NATURAL, None, 1, 1), 2.0)


def weights(app: App) -> dict[str, float]:
    handler: Any = app.assembly.plugins.handler
    return {step.name: step.weight for step in handler.profile.scorers}


def scorers(**weight: float) -> str:
    """A profile with these scorers, underscores standing for dashes."""
    names = {name.replace("_", "-"): value for name, value in weight.items()}
    uses = [{"pluginRef": name, "weight": value} for name, value in names.items()]
    text = {
        "plugins": [{"type": name} for name in names],
        "schedulingProfiles": [{"name": "p", "plugins": uses}],
    }
    return yaml.safe_dump(text)


# -- what applies -----------------------------------------------------------------------------------


def test_weights_change_and_the_index_goes_on() -> None:
    app = picker(scorers(prefix_cache_scorer=3, queue_scorer=2))
    producer: Any = app.assembly.named[PREFIX]
    end(app, place(app))
    assert producer.size > 0
    assert app.use(load(scorers(prefix_cache_scorer=1, queue_scorer=5))) == ()
    assert weights(app) == {"prefix-cache-scorer": 1.0, "queue-scorer": 5.0}
    assert app.assembly.named[PREFIX] is producer
    size = producer.size
    place(app)
    assert producer.size == size, "the prompt was known already"


def test_thresholds_objectives_rewrites_and_parsers_change() -> None:
    app = picker()
    assert app.director.plugins.objectives.priority("batch") == 0
    app.use(
        load(
            "plugins:\n"
            "- {type: utilization-detector, parameters: {queueDepthThreshold: 9}}\n"
            "- {type: openai-parser}\n"
            "objectives: [{name: batch, priority: -5}]\n"
            "modelRewrites: [{name: r, rules: [{targets: [{modelRewrite: other}]}]}]\n"
            "requestHandler: {parsers: [{pluginRef: openai-parser}]}\n"
        )
    )
    plugins = app.director.plugins
    assert plugins.objectives.priority("batch") == -5
    assert plugins.rewrites.names == {"other"}
    assert plugins.parsers.types == app.router.decoder.parsers.types == ("openai-parser",)
    detector: Any = app.assembly.named["utilization-detector"]
    assert app.assembly.loaded.plugins[0].params.queue_depth_threshold == 9  # type: ignore[attr-defined]
    assert detector is not None


def test_a_changed_parameter_that_shapes_state_starts_a_plugin_anew() -> None:
    app = picker("plugins: [{type: prefix-cache-scorer}]")
    before: Any = app.assembly.named[PREFIX]
    place(app)
    larger = f"{{type: {PREFIX}, parameters: {{blockSizeTokens: 256}}}}"
    app.use(load(f"plugins: [{{type: prefix-cache-scorer}}, {larger}]"))
    after: Any = app.assembly.named[PREFIX]
    assert after is not before
    assert (before.size > 0, after.size, after.block_tokens) == (True, 0, 256)


def test_a_changed_parameter_that_does_not_is_told_to_the_living_plugin() -> None:
    app = picker("plugins: [{type: prefix-cache-scorer}]")
    before: Any = app.assembly.named[PREFIX]
    end(app, place(app))
    size = before.size
    limited = f"{{type: {PREFIX}, parameters: {{maxPrefixTokensToMatch: 64}}}}"
    app.use(load(f"plugins: [{{type: prefix-cache-scorer}}, {limited}]"))
    assert app.assembly.named[PREFIX] is before
    assert before.size == size > 1
    place(app, prompt=b"b" * 4000)
    assert before.size == size + 1, "one block of the new prompt"


def test_a_plugin_of_another_type_under_the_same_name_starts_anew() -> None:
    app = picker("plugins: [{name: x, type: witness}]")
    before = app.assembly.named["x"]
    app.use(load("plugins: [{name: x, type: queue-scorer}]"))
    assert app.assembly.named["x"] is not before
    app.use(load("plugins: [{name: x, type: witness}]"))
    assert app.assembly.named["x"] is not before


def test_types_without_parameters_do_not_go_on_as_each_other() -> None:
    app = picker("plugins: [{name: x, type: queue-scorer}]")
    app.use(load("plugins: [{name: x, type: kv-cache-utilization-scorer}]"))
    assert isinstance(app.assembly.named["x"], KvCacheUtilizationScorer)


def test_new_plugins_hear_of_the_present_endpoints_once() -> None:
    app = picker("plugins: [{type: queue-scorer}]")
    app.use(load("plugins: [{type: witness}]"))
    assert witness(app.assembly).owned == {0, 1, 2}
    app.use(load("plugins: [{type: witness}, {type: queue-scorer}]"))
    assert witness(app.assembly).owned == {0, 1, 2}


def test_who_wants_to_hears_of_another_configuration_in_use() -> None:
    app = picker(scorers(queue_scorer=2))
    heard: list[dict[str, float]] = []
    app.running.heard_by.append(lambda: heard.append(weights(app)))
    for weight in (2, 3, 3):
        app.use(load(scorers(queue_scorer=weight)))
    assert heard == [{"queue-scorer": 3.0}]


def test_the_same_configuration_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "epp.runtime.reload")
    app = picker("plugins: [{type: witness}]")
    plugins, assembly = app.director.plugins, app.assembly
    app.use(load("plugins: [{type: witness}]"))
    assert (app.director.plugins, app.assembly) == (plugins, assembly)
    assert [each for each in caplog.records if each.name.startswith("epp.")] == []


# -- requests in flight -----------------------------------------------------------------------------


def test_requests_in_flight_keep_the_plugins_they_were_placed_with() -> None:
    app = picker("plugins: [{type: witness}]")
    first = witness(app.assembly)
    early = place(app)
    app.use(load("plugins: [{type: witness, parameters: {colour: green}}]"))
    second = witness(app.assembly)
    late = place(app)
    assert (first.open, second.open) == ({early.ticket}, {late.ticket})
    app.set_endpoints([])
    end(app, early)
    end(app, late)
    assert (first.open, second.open, first.unknown, second.unknown) == (set(), set(), [], [])


def test_earlier_plugins_hear_of_endpoints_until_their_last_request_ends() -> None:
    app = picker("plugins: [{type: witness}]")
    first = witness(app.assembly)
    early = place(app)
    app.use(load("plugins: [{type: queue-scorer}]"))
    app.set_endpoints([runtime.endpoint(number) for number in range(1, 6)])
    assert first.owned == {0, 1, 2, 3, 4}
    end(app, early)
    app.running.release(app.director)
    app.set_endpoints([runtime.endpoint(number) for number in range(1, 9)])
    assert first.owned == {0, 1, 2, 3, 4}, "nobody needs it any more"


def test_what_was_in_flight_before_is_given_back_where_it_was_taken() -> None:
    app = picker("plugins: [{type: active-request-scorer}]")
    first: Any = app.assembly.named["inflight-load-producer"]
    early = place(app)
    app.use(load("plugins: [{type: queue-scorer}]"))
    assert first.in_flight == 1
    end(app, early)
    assert (first.in_flight, first.loads()) == (0, [])
    assert (app.ledger.total_requests, app.ledger.total_prefill_tokens) == (0, 0)


# -- what does not apply ----------------------------------------------------------------------------


def test_a_plugin_that_cannot_be_built_changes_nothing() -> None:
    app = picker("plugins: [{type: witness}, {name: other, type: witness}]")
    plugins, assembly, made = app.director.plugins, app.assembly, witness(app.assembly)
    changed = "{type: witness, parameters: {mood: wild}}"
    broken = "{name: other, type: witness, parameters: {fails: true}}"
    with pytest.raises(ConfigError, match="other failed to start: OSError: out of paint"):
        app.use(load(f"plugins: [{changed}, {broken}]"))
    assert (app.director.plugins, app.assembly) == (plugins, assembly)
    assert made.params.mood == "calm"
    app.use(load(f"plugins: [{changed}, {{name: other, type: witness}}]"))
    assert witness(app.assembly) is made
    assert made.params.mood == "wild"


PAGES = "{name: pages, type: metrics-data-source, parameters: {interval: %s}}"
FILES = "{name: files, type: file-discovery, parameters: {path: %s}}"
DISCOVERY = "dataLayer: {discovery: {pluginRef: files}}\n"
BOTH = "dataLayer: {discovery: {pluginRef: files}, sources: [{pluginRef: models-data-source}]}\n"


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (f"plugins: [{PAGES % '2s'}, {FILES % 'a'}]\n{DISCOVERY}", ("$.plugins[0].parameters",)),
        (f"plugins: [{PAGES % '1s'}, {FILES % 'b'}]\n{DISCOVERY}", ("$.plugins[1].parameters",)),
        (
            f"plugins: [{PAGES % '3s'}, {FILES % 'b'}]\n{DISCOVERY}",
            ("$.plugins[0].parameters", "$.plugins[1].parameters"),
        ),
        (f"plugins: [{PAGES % '1s'}]\n", ("$.dataLayer.discovery",)),
        (f"plugins: [{FILES % 'a'}]\n{DISCOVERY}", ("$.dataLayer.sources",)),
        (
            f"plugins: [{PAGES % '1s'}, {FILES % 'a'}, {{type: models-data-source}}]\n{BOTH}",
            ("$.dataLayer.sources",),
        ),
        ("", ("$.dataLayer.discovery", "$.dataLayer.sources")),
    ],
)
def test_the_data_layer_needs_a_restart_and_the_rest_applies(
    text: str, paths: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    started = f"plugins: [{PAGES % '1s'}, {FILES % 'a'}]\n{DISCOVERY}"
    app = picker(started)
    sources, discovery = app.assembly.sources, app.assembly.discovery
    for round_number in (1, 2):
        objectives = f"objectives: [{{name: o, priority: {round_number}}}]\n"
        assert app.use(load(text + objectives)) == paths
        assert (app.assembly.sources, app.assembly.discovery) == (sources, discovery)
        assert app.director.plugins.objectives.priority("o") == round_number
    warned = [record for record in caplog.records if "restart needed" in record.message]
    assert [record.paths for record in warned] == [list(paths)] * 2  # type: ignore[attr-defined]
    assert app.use(load(started)) == ()


def test_the_effective_configuration_is_the_running_one() -> None:
    app = picker(f"plugins: [{PAGES % '1s'}, {FILES % 'a'}]\n{DISCOVERY}")
    app.use(
        load(f"plugins: [{{type: queue-scorer}}, {PAGES % '9s'}]\nobjectives: [{{name: o, priority: 3}}]\n")
    )
    shown = str(app.running.effective)
    again = load_config(shown, "effective")
    assert {name: plugin.params for name, plugin in named(again).items()} == {
        **{
            name: plugin.params
            for name, plugin in named(app.assembly.loaded).items()
            if name not in ("pages", "core-metrics-extractor")
        },
        **{
            name: plugin.params
            for name, plugin in named(load(f"plugins: [{PAGES % '1s'}, {FILES % 'a'}]\n{DISCOVERY}")).items()
            if name in ("pages", "files", "core-metrics-extractor")
        },
    }
    assert again.discovery == "files"
    kept = [line for line in shown.splitlines() if line.endswith("# kept from the start: restart needed")]
    assert any('interval: "1s"' in line for line in kept)
    assert any("pluginRef: files" in line for line in kept)
    assert "priority: 3" in shown
    assert "# file, line 3" in shown


def named(loaded: Any) -> dict[str, Any]:
    return {plugin.name: plugin for plugin in loaded.plugins}


def test_the_effective_configuration_at_the_start_is_that_of_the_file() -> None:
    app = App.assemble(Options(), default_config())
    assert "restart needed" not in str(app.running.effective)


# -- members ----------------------------------------------------------------------------------------


def test_a_member_that_is_there_twice_hears_once() -> None:
    app = picker()
    members = PluginMembers(app.store.view)
    one = reloading.Witness(None, reloading.WitnessParams())  # type: ignore[arg-type]
    members.use([one, one])
    assert one.owned == {0, 1, 2}
    members.joined(3)
    members.left(0)
    members.use([one])
    assert one.owned == {1, 2, 3}
    members.use([])
    members.left(1)
    assert one.owned == {1, 2, 3}


def test_the_index_of_the_default_producer_follows_the_pool() -> None:
    """What a reload leaves in use is told of endpoints as before."""
    app = picker(scorers(prefix_cache_scorer=3))
    app.use(load(scorers(prefix_cache_scorer=4)))
    producer = app.assembly.named[PREFIX]
    assert isinstance(producer, ApproximatePrefixProducer)
    end(app, place(app))
    assert producer.size > 0
    app.set_endpoints([])
    app.store.refresh(3.0, 1.0)
    assert producer.size == 0


# -- policies from elsewhere ------------------------------------------------------------------------

FILE_POLICIES = (
    "objectives: [{name: batch, priority: -5}, {name: chat, priority: 1}]\n"
    "modelRewrites: [{name: file, rules: [{targets: [{modelRewrite: of-the-file}]}]}]\n"
)


def rewrite(name: str, target: str, *models: str) -> ModelRewrite:
    return ModelRewrite(name, (RewriteRule(models, (RewriteTarget(target),)),))


def asked_for(app: App, model: str) -> str:
    found = app.director.plugins.rewrites.target(model, Random(1))
    assert found is not None
    return found.target


def test_policies_from_elsewhere_count_before_those_of_the_file() -> None:
    app = picker(FILE_POLICIES)
    app.running.follow(Policies({"batch": 7}, (rewrite("cluster", "of-the-cluster", "m"),)), app.director)
    for _ in range(2):
        objectives = app.director.plugins.objectives
        assert [objectives.priority(name) for name in ("batch", "chat", "none")] == [7, 1, 0]
        assert [asked_for(app, model) for model in ("m", "n")] == ["of-the-cluster", "of-the-file"]
        app.use(load(FILE_POLICIES + scorers(queue_scorer=1)))
    app.running.follow(Policies(), app.director)
    assert app.director.plugins.objectives.priority("batch") == -5
    assert asked_for(app, "m") == "of-the-file"


def test_under_other_policies_plugins_go_on_with_what_they_remember() -> None:
    app = App.assemble(Options(seed=1), load("plugins: [{type: witness}]\n"))
    app.set_endpoints([runtime.endpoint(1)])
    seen = witness(app.assembly)
    placements = []
    for number in range(20):
        placements.append(place(app))
        app.running.follow(Policies({"batch": number}), app.director)
    app.use(load("plugins: [{type: witness, parameters: {colour: blue}}]\n"))
    app.set_endpoints([runtime.endpoint(1), runtime.endpoint(2)])
    assert seen.owned == {0, 1}, "requests placed with it are in flight"
    for placement in placements:
        end(app, placement)
    assert not seen.open
    assert not seen.unknown
    app.running.release(app.director)
    app.set_endpoints([runtime.endpoint(number) for number in (1, 2, 3)])
    assert seen.owned == {0, 1}, "nobody was placed with it"


def test_the_same_policies_again_change_nothing() -> None:
    app = picker()
    app.running.follow(Policies({"batch": 1}), app.director)
    plugins = app.director.plugins
    app.running.follow(Policies({"batch": 1}), app.director)
    assert app.director.plugins is plugins
