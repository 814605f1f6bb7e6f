"""What the proxy says of who served, told to the client: for conformance tests of gateways."""

from typing import Final

from epp.scheduling.records import AnswerFact, AnswerHeaders, Edits, Ticket

SERVED_HEADER: Final = "x-conformance-test-served-endpoint"
_NOT_TOLD: Final = b"fail: missing destination endpoint served metadata"


class ServedEndpointVerifier:
    """`destination-endpoint-served-verifier`: answers carry the endpoint that the proxy reports to have used.

    Where it reports none the header says so, in the words of the conformance suite. (Those have another text
    for a proxy without any `envoy.lb` metadata; it is the same failure, and not told apart here.)
    """

    def observe(self, ticket: Ticket, fact: AnswerFact, now: float) -> Edits | None:
        if not isinstance(fact, AnswerHeaders):
            return None
        return ((SERVED_HEADER, fact.served.encode() if fact.served else _NOT_TOLD),)
