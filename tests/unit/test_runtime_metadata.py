"""Dynamic metadata of a whole picker: scores beside the destination, a reporter's figure at the end."""

from collections.abc import Callable
from typing import Any

import pytest

from epp import names
from epp.runtime import router
from epp.runtime.app import App
from epp.scheduling.records import Placement
from epp.wire import ext_proc_pb2 as pb
from tests.data.runtime import picker as made

USAGE = b'{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":12}}'
REPORTER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: request-attribute-reporter
  parameters:
    attributes:
    - key: {name: cost}
      expression: EXPRESSION
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]
"""


def exchanged(app: App) -> list[pb.ProcessingResponse]:
    """All that the picker sends for one chat with a plain answer."""
    stream = app.stream(lambda: None)
    for message in (
        made.request_headers(),
        *made.request_body(made.chat()),
        made.response_headers(),
        made.response_body(USAGE, end=True),
    ):
        stream.received(message)
    assert stream.finished
    assert made.nothing_left(app)()
    return [pb.ProcessingResponse.FromString(message) for message in stream.outbox]


def space(reply: pb.ProcessingResponse) -> Any:
    return reply.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value.fields


def scores_told(app: App) -> dict[str, float]:
    told = space(exchanged(app)[0])
    assert told[names.DESTINATION_ENDPOINT].string_value
    scores = told[names.DESTINATION_ENDPOINT_SCORES].struct_value.fields
    return {host_port: score.number_value for host_port, score in scores.items()}


def _scores_are_the_totals() -> None:
    app = made.picker(3, emit_endpoint_scores=True)
    (busy,) = [slot for slot, endpoint in app.store.roster if endpoint.name == "pod-2"]
    app.store.view.waiting[busy] = 10
    scores = scores_told(app)
    assert set(scores) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}
    total = app.recorder.decisions[-1].legs[-1].decision.total
    assert scores == {app.store.view.host_ports[slot]: total[slot] for slot, _ in app.store.roster}
    assert min(scores, key=scores.__getitem__) == "10.0.0.2:8000"


def test_scores_are_the_totals_of_all_candidates() -> None:
    _scores_are_the_totals()


def test_no_scores_unless_asked_for() -> None:
    replies = exchanged(made.picker(3))
    assert set(space(replies[0])) == {names.DESTINATION_ENDPOINT}
    assert not any(reply.HasField("dynamic_metadata") for reply in replies[1:])


def test_a_reporters_figure_comes_with_the_last_reply() -> None:
    app = made.picker(2, REPORTER.replace("EXPRESSION", "usage.prompt_tokens + usage.completion_tokens"))
    *before, last = exchanged(app)
    assert {key: figure.number_value for key, figure in space(last).items()} == {"cost": 42.0}
    assert last.response_body.response.body_mutation.streamed_response.body == USAGE
    assert [reply.HasField("dynamic_metadata") for reply in before] == [True, False, False]


def test_a_reporter_that_fails_costs_its_figure_and_nothing_else() -> None:
    app = made.picker(2, REPORTER.replace("EXPRESSION", "usage.nothing"))
    *_, last = exchanged(app)
    assert not last.HasField("dynamic_metadata")
    assert last.response_body.response.body_mutation.streamed_response.end_of_stream
    assert made.sample(app, "plugin_failures_total") == 1


# -- faults that these tests must see ------------------------------------------------------------------


def _only_the_chosen(view: Any, placement: Placement) -> Any:
    return RIGHT(view, placement)[:1]


def _by_slot(view: Any, placement: Placement) -> Any:
    return tuple((str(slot), score) for slot, (_, score) in enumerate(RIGHT(view, placement)))


def _all_alike(view: Any, placement: Placement) -> Any:
    return tuple((host_port, 1.0) for host_port, _ in RIGHT(view, placement))


RIGHT = router._scores


@pytest.mark.parametrize("fault", [_only_the_chosen, _by_slot, _all_alike])
def test_wrong_scores_are_seen(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_scores", fault)
    with pytest.raises(AssertionError):
        _scores_are_the_totals()
