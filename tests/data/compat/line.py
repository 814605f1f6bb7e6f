"""The line from a proxy's messages to the picker's replies, in one process: codec, exchange, director.

Everything between the bytes that come in and the bytes that go out is the real thing, put together from a
configuration file. Scraped facts are set as a scrape would set them.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, Never

import msgspec
import yaml

from epp.config.load import build, default_config, load_config
from epp.director import Director
from epp.extproc import codec
from epp.extproc.exchange import Exchange
from epp.extproc.limits import BodyBudget, Limits
from epp.extproc.records import (
    BodyMode,
    Closed,
    Edited,
    Event,
    Finish,
    Headers,
    Modes,
    Observe,
    Refused,
    RequestChunk,
    RequestHeaders,
    ResponseChunk,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Routed,
    Send,
)
from epp.payload.records import RawRequest
from epp.pool.ledger import InflightLedger
from epp.pool.metrics_page import EngineSample, LoraSample
from epp.pool.records import Endpoint
from epp.pool.store import FIRST_CAPACITY, PoolStore
from epp.runtime.decoder import Decoder
from epp.runtime.metrics import Metrics
from epp.runtime.recorder import RuntimeRecorder
from epp.runtime.router import Router
from epp.scheduling.records import AnswerHeaders, Completed
from tests.data.extproc import script

FULL_DUPLEX = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
BUFFERED = Modes(BodyMode.BUFFERED, BodyMode.BUFFERED)
JSON = "application/json"
SSE = "text/event-stream"


class P(NamedTuple):
    """What one endpoint's metrics page says, and where the endpoint is.

    Attributes:
        adapters: those that run there, with no room for others. None: the engine has none.
    """

    waiting: float = 0
    kv_usage: float = 0.0
    host_port: str = ""
    labels: Mapping[str, str] = MappingProxyType({})
    adapters: Sequence[str] | None = None


class InPlace(Router):
    """Reads a body of any size itself and at once, and hides no fault behind a 500."""

    _outcome: Routed | Refused | None = None

    def route(self, raw: RawRequest, deliver: Any) -> Routed | Refused | None:
        self._outcome = None
        return super().route(raw, deliver) or self._outcome

    def _later(self, raw: RawRequest, deliver: Any, work: Any) -> None:
        self._outcome = work() or self._outcome

    def _look(self, raw: RawRequest, received_at: float, deliver: Any) -> None:
        self._outcome = self._route(raw, received_at, deliver) or self._outcome

    def _route(self, raw: RawRequest, received_at: float, deliver: Any) -> Routed | Refused | None:
        return self._routed(raw, partial(self._director.prepare, raw, received_at), deliver)

    def _broken(self, raw: RawRequest) -> Never:
        raise  # the fault at hand


class Line:
    """A picker over endpoints 192.168.1.1:8000, 192.168.1.2:8000 ..."""

    def __init__(
        self,
        *pods: P,
        config: str | None = None,
        sample: EngineSample | None = None,
        use_subset: bool = True,
        tell_scores: bool = False,
    ) -> None:
        """`sample`: what all pages say besides (block size, cache size)."""
        self.now = 100.0
        self.budget = BodyBudget(Limits().held_bytes)
        self.ledger = InflightLedger(FIRST_CAPACITY, strict=True)
        self.store = PoolStore(busy=self.ledger.busy)
        loaded = default_config() if config is None else load_config(config, "config.yaml")
        self.assembly = build(loaded, self.store.view, secret=b"secret")
        for member in self.assembly.members:
            self.store.add_member(member)
        self.metrics = Metrics("pool", ("", ""))
        self.recorder = RuntimeRecorder(self.metrics, self.store.view)
        self.director = Director(
            self.store,
            self.ledger,
            self.assembly.plugins,
            self.recorder,
            Random(7),
            max_body_bytes=Limits().body_bytes,
            use_subset=use_subset,
        )
        self.metrics.pin(self.assembly.plugins.rewrites.names)
        self.router = InPlace(
            self.director,
            self.recorder,
            Decoder(Limits().body_bytes),
            lambda: self.now,
            lambda now: None,
            scored=self.store.view if tell_scores else None,
        )
        self._made_ids = count(1)
        self.store.sync(
            [endpoint(pod.host_port or address(i), pod.labels) for i, pod in enumerate(pods)], self.now
        )
        self.ledger.resize(self.store.view.capacity)
        self.scrape(*pods, sample=sample)

    def scrape(self, *pods: P, sample: EngineSample | None = None) -> None:
        """The endpoints' pages were read, in order of the pods."""
        more = sample or EngineSample()
        for (slot, _), pod in zip(self.store.roster, pods, strict=True):
            lora = None if pod.adapters is None else LoraSample(frozenset(pod.adapters))
            told = msgspec.structs.replace(
                more, waiting=pod.waiting, running=0.0, kv_usage=pod.kv_usage, lora=lora
            )
            self.store.sampled(slot, told, self.now)
        for plugin in self.assembly.refreshed:
            plugin.refresh(self.now)

    def stream(self) -> "Stream":
        """One HTTP request as the proxy tells of it."""
        reports = bool(self.director.plugins.reporters)
        exchange = Exchange(self.budget, Limits(), lambda: f"made-{next(self._made_ids)}", reports=reports)
        return Stream(self, exchange)

    def ask(self, *body: bytes, **request: Any) -> "Stream":
        """A request whose body comes in these pieces; without any, a request without a body."""
        stream = self.stream()
        stream.request(*body, **request)
        return stream

    def sample(self, series: str, **labels: str) -> float | None:
        """One value of the picker's own metrics page."""
        return self.metrics.registry.get_sample_value(f"llm_d_epp_{series}", labels)

    @property
    def idle(self) -> bool:
        """Nothing is charged, held or in flight."""
        load = self.ledger.total_requests + self.ledger.total_prefill_tokens
        return load == 0 and self.budget.used == 0 and self.director.in_flight == 0


class Stream:
    """One ext-proc stream.

    Attributes:
        wire, replies: what the picker said, as bytes and in the notation of the exchange's scripts.
        raw: the request as it was routed.
        finished: the exchange has ended.
    """

    def __init__(self, line: Line, exchange: Exchange) -> None:
        self.line = line
        self.wire: list[bytes] = []
        self.replies: list[dict[str, Any]] = []
        self.raw: RawRequest | None = None
        self.finished = False
        self._exchange = exchange

    # -- what the proxy says ----------------------------------------------------------------------

    def request(
        self,
        *body: bytes,
        method: str = "POST",
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        subset: Sequence[str] | None = None,
        modes: Modes = FULL_DUPLEX,
    ) -> None:
        """Headers, then the pieces of the body; the subset hint comes with each message."""
        hint = None if subset is None else tuple(subset)
        fields = {":method": method, ":path": path, "content-type": JSON, **(headers or {})}
        self.say(RequestHeaders(self.line.now, _encoded(fields), not body, hint, modes))
        for number, piece in enumerate(body, 1):
            self.say(RequestChunk(self.line.now, piece, number == len(body), hint))

    def answer(
        self,
        *body: bytes,
        status: int = 200,
        content_type: str = JSON,
        served: str | None = None,
        headers: dict[str, str] | None = None,
        trailers: bool = False,
    ) -> None:
        """The engine's answer, in these pieces. `trailers`: they end it, and no piece does."""
        fields = {":status": str(status), "content-type": content_type, **(headers or {})}
        self.say(ResponseHeaders(self.line.now, _encoded(fields), not body and not trailers, served))
        for number, piece in enumerate(body, 1):
            self.say(ResponseChunk(self.line.now, piece, number == len(body) and not trailers))
        if trailers:
            self.say(ResponseTrailers(self.line.now))

    def close(self, *, error: bool = False) -> None:
        self._perform(Closed(self.line.now, error))

    def say(self, event: Event) -> None:
        """One message of the proxy, as bytes."""
        self.say_bytes(script.to_wire(event))

    def say_bytes(self, message: bytes) -> None:
        self._perform(codec.decode(message, self.line.now))

    # -- what the picker said ---------------------------------------------------------------------

    @property
    def destination(self) -> str | None:
        """Header and metadata of the one reply that carries the pick."""
        picks = [reply["destination"] for reply in self.replies if reply.get("destination")]
        assert len(picks) <= 1
        return picks[0] if picks else None

    @property
    def pod(self) -> int:
        """Index of the picked endpoint."""
        assert self.destination is not None
        return int(self.destination.rpartition(".")[2].partition(":")[0]) - 1

    @property
    def head(self) -> dict[str, Any]:
        """Edits of the request's headers."""
        (reply,) = [one for one in self.replies if one.get("destination")]
        return reply

    @property
    def answer_head(self) -> dict[str, Any]:
        """Edits of the answer's headers."""
        (reply,) = [one for one in self.replies if one.get("headers") == "response"]
        return reply

    def pieces(self, direction: str) -> list[tuple[bytes, bool]]:
        """Pieces of a body as sent on, each with whether it ends the body."""
        return [
            (reply["content"], reply["eos"]) for reply in self.replies if reply.get("streamed") == direction
        ]

    def body(self, direction: str) -> bytes:
        """A body as sent on; it must have ended exactly once, at its end."""
        pieces = self.pieces(direction)
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
        return b"".join(content for content, _ in pieces)

    @property
    def refusal(self) -> tuple[int, str, dict[str, str]]:
        """Status, message and headers of the answer the picker gave itself; nothing else was said."""
        (reply,) = self.replies
        return reply["immediate"], reply["message"], reply["headers"]

    # -- between ----------------------------------------------------------------------------------

    def _perform(self, event: Event) -> None:
        inbox: deque[Event] = deque([event])
        while inbox:
            for effect in self._exchange.receive(inbox.popleft()):
                match effect:
                    case Send(reply):
                        self.wire.append(codec.encode(reply))
                        self.replies.append(script.show_wire(self.wire[-1]))
                    case Route(raw):
                        inbox.append(self._route(raw))
                    case Observe(ticket, Completed() as fact):
                        metadata = self.line.router.report(ticket, fact)
                        inbox.append(Edited(self.line.now, metadata=metadata))
                    case Observe(ticket, fact):
                        edits = self.line.router.observe(ticket, fact)
                        if isinstance(fact, AnswerHeaders):
                            inbox.append(Edited(self.line.now, edits))
                    case Finish():
                        assert not self.finished
                        self.finished = True

    def _route(self, raw: RawRequest) -> Routed | Refused:
        self.raw = raw
        outcome = self.line.router.route(raw, _too_late)
        assert outcome is not None
        return outcome


def _too_late(outcome: Routed | Refused) -> None:
    raise AssertionError("routed late")


def address(index: int) -> str:
    return f"192.168.1.{index + 1}:8000"


def endpoint(host_port: str, labels: Mapping[str, str] = MappingProxyType({})) -> Endpoint:
    host, _, port = host_port.rpartition(":")
    return Endpoint(host_port, f"pod-{host_port}", "default", host.strip("[]"), int(port), labels)


def _encoded(fields: dict[str, str]) -> Headers:
    return tuple((name, value.encode()) for name, value in fields.items())


def prompt(model: str | None = "my-model", **fields: Any) -> bytes:
    """The body of a request for completions."""
    named = {} if model is None else {"model": model}
    return json.dumps({**named, "prompt": "test1", "max_tokens": 100, "temperature": 0, **fields}).encode()


def model_labels(model: str, target: str, *, flow: str = "default-flow", priority: int = 0) -> dict[str, str]:
    """Labels of the metrics of one kind of request."""
    return {
        "model_name": model,
        "target_model_name": target,
        "fairness_id": flow,
        "priority": str(priority),
    }


def config(*plugins: dict[str, Any], uses: Sequence[str] = (), **sections: Any) -> str:
    """A configuration with these plugins and sections, and one profile that uses the named ones."""
    profiles = [{"name": "default", "plugins": [{"pluginRef": name} for name in uses]}] if uses else []
    kind = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return yaml.safe_dump({**kind, "plugins": list(plugins), "schedulingProfiles": profiles, **sections})


def profile(*scorers: str, picks: int = 1) -> str:
    """A configuration whose one profile has these scorers with weight 1, and names `picks` endpoints."""
    picker = {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": picks}}
    plugins = [*({"type": scorer} for scorer in scorers), picker]
    return config(*plugins, uses=(*scorers, "max-score-picker"))


WEIGHTS_ONE = profile("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
