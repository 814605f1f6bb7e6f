"""Faults that users of other pickers met with their configuration; `docs/field-reports.md` names each."""

from typing import Any

import pytest

from epp.pool.store import empty_view
from epp.scheduling.handlers import HeaderProfileHandlerParams
from epp.scheduling.header_names import header_name, settable_header_name
from tests.data.scheduling import tickets

READ_FROM: list[tuple[str, Any]] = [
    ("agent-identity", lambda name: {"additionalSessionHeaders": ["x-fine", name]}),
    ("header-label-affinity-scorer", lambda name: {"headerName": name, "labelKey": "a"}),
    ("session-id-producer", lambda name: {"headerName": name}),
    *(
        (kind, lambda name: {"strategy": "session_id", "sessionIdConfig": {"sources": [{"header": name}]}})
        for kind in ("session-affinity-filter", "session-affinity-scorer")
    ),
]
SET_ON_ANSWERS: list[tuple[str, Any]] = [
    (kind, lambda name: {"encodedEndpointHeaderConfig": {"header": name}})
    for kind in ("session-affinity-filter", "session-affinity-scorer")
]
IMPOSSIBLE = [":path", "X Foo", "x-foo:", "x\nfoo", "x-\N{LATIN SMALL LETTER E WITH ACUTE}", 'x"', "x,y"]


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize(("kind", "parameters"), READ_FROM + SET_ON_ANSWERS)
def test_a_name_that_no_header_can_have_is_refused(kind: str, parameters: Any, name: str) -> None:
    with pytest.raises(ValueError, match="is no header name; use letters, digits and hyphens"):
        tickets.made(kind, empty_view(2), **parameters(name))
    with pytest.raises(ValueError, match="is no header name"):
        HeaderProfileHandlerParams(header_name=name)


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "Connection", "te", "content-type"])
@pytest.mark.parametrize(("kind", "parameters"), SET_ON_ANSWERS)
def test_a_header_of_the_message_itself_is_not_set(kind: str, parameters: Any, name: str) -> None:
    with pytest.raises(ValueError, match="describes the message itself"):
        tickets.made(kind, empty_view(2), **parameters(name))


@pytest.mark.parametrize("name", ["X-Foo", " x_foo ", "x.1!#$%&'*+^`|~"])
@pytest.mark.parametrize(("kind", "parameters"), READ_FROM + SET_ON_ANSWERS)
def test_other_names_are_lowered_and_taken(kind: str, parameters: Any, name: str) -> None:
    assert tickets.made(kind, empty_view(2), **parameters(name))
    assert header_name(name) == settable_header_name(name) == name.strip().lower()
