"""Scraping a large pool: how often, and what a change of it costs."""

import msgspec
import pytest
from yarl import URL

from epp import names
from epp.config.spec import MetricsSourceSpec, ModelsExtractorSpec, ModelsSourceSpec, SourceUse
from epp.pool.records import Endpoint
from epp.pool.store import PoolStore
from epp.runtime import scrape
from epp.runtime.scrape import DEFAULT_SOURCES, Scraper

MODELS = ModelsSourceSpec()


def endpoints(count: int) -> list[Endpoint]:
    return [Endpoint(f"uid-{n}", f"pod-{n}", "ns", f"10.0.{n // 250}.{n % 250}", 8000) for n in range(count)]


def pool(count: int) -> tuple[PoolStore, Scraper]:
    store = PoolStore()
    scraper = Scraper(store, (*DEFAULT_SOURCES, SourceUse(MODELS, (ModelsExtractorSpec(),))))
    store.sync(endpoints(count), 0.0)
    return store, scraper


@pytest.mark.parametrize(
    ("count", "busy_s", "idle_s", "models_s"),
    [
        (0, 0.2, 1.0, 5.0),
        (300, 0.2, 1.0, 5.0),
        (600, 0.4, 1.0, 5.0),
        (1000, 2 / 3, 1.0, 5.0),
        (3000, 2.0, 2.0, 5.0),
        (9000, 6.0, 6.0, 6.0),
    ],
)
def test_a_large_pool_is_read_less_often(count: int, busy_s: float, idle_s: float, models_s: float) -> None:
    _, scraper = pool(count)
    assert scraper.interval_s(0.0) == pytest.approx(idle_s)
    scraper.busy(0.0)
    assert scraper.interval_s(1.0) == pytest.approx(busy_s)
    assert scraper.interval_of(MODELS, 1.0) == pytest.approx(models_s)


def test_an_interval_of_a_source_does_not_go_beyond_the_bound() -> None:
    store = PoolStore()
    source = MetricsSourceSpec(interval_s=0.05)
    scraper = Scraper(store, (SourceUse(source, DEFAULT_SOURCES[0].extractors),))
    scraper.busy(0.0)
    assert scraper.interval_s(1.0) == pytest.approx(0.05)
    store.sync(endpoints(1500), 0.0)
    assert scraper.interval_s(1.0) == pytest.approx(1.0)


def test_a_change_costs_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand endpoints one comes, one moves, and one is of another engine by its label."""
    made: list[str] = []

    def counted(text: str) -> URL:
        made.append(text)
        return URL(text)

    monkeypatch.setattr(scrape, "URL", counted)
    store, scraper = pool(1000)
    poller = scraper._pollers[0]

    def followed(members: list[Endpoint]) -> set[str]:
        """What is made for a change."""
        made.clear()
        store.sync(members, 0.0)
        poller._follow_roster()
        return {*made}

    members = endpoints(1001)
    assert len(followed(members[:1000])) == 1000
    assert followed(members) == {"http://10.0.4.0:8000/metrics"}
    members[3] = msgspec.structs.replace(members[3], address="10.9.9.9")
    assert followed(members) == {"http://10.9.9.9:8000/metrics"}
    members[4] = msgspec.structs.replace(members[4], labels={names.ENGINE_LABELS[0]: "trtllm-serve"})
    assert followed(members) == {"http://10.0.0.4:8000/prometheus/metrics"}
    urls = {target.endpoint.uid: str(target.url) for target in poller._targets.values()}
    assert urls.pop("uid-4") == "http://10.0.0.4:8000/prometheus/metrics"
    assert urls == {each.uid: f"http://{each.address}:8000/metrics" for each in members if each.uid in urls}
    assert len(urls) == 1000


def test_trouble_with_many_is_said_of_each_in_turn_and_again_after_a_while() -> None:
    now, said = [0.0], list[str]()
    store = PoolStore()
    scraper = Scraper(store, clock=lambda: now[0], on_error=said.append)
    store.sync(endpoints(25), 0.0)
    poller = scraper._pollers[0]
    poller._follow_roster()

    def named(at_s: float) -> list[int]:
        """Whom a line names when all are refused at this time."""
        now[0] = at_s
        said.clear()
        for target in poller._targets.values():
            poller._failed(target, "refused", "connection refused", refused=True)
        assert len(said) <= scrape.MOST_COMPLAINTS
        more = [line.endswith("the same of others is not said for a while") for line in said]
        assert not any(more[:-1])
        assert more[-1:] in ([], [len(said) == scrape.MOST_COMPLAINTS])
        return [int(line.split("pod-")[1].split(" ")[0]) for line in said]

    assert named(0.0) == [*range(10)]
    assert named(1.0) == named(29.0) == []
    assert named(31.0) == [*range(10, 20)]
    assert named(62.0) == [*range(20, 25)]
    # Every 75 s now, so that each comes before one comes again.
    assert named(74.0) == []
    assert named(100.0) == [*range(10)]
    store.sync(endpoints(1), 100.0)
    poller._follow_roster()
    assert named(129.0) == []
    assert named(131.0) == [0]


def test_another_trouble_is_said_at_once() -> None:
    now, said = [0.0], list[str]()
    store = PoolStore()
    scraper = Scraper(store, clock=lambda: now[0], on_error=said.append)
    store.sync(endpoints(1), 0.0)
    poller = scraper._pollers[0]
    poller._follow_roster()
    (target,) = poller._targets.values()
    for kind in ("refused", "refused", "timeout", "timeout", "refused"):
        poller._failed(target, kind, kind)
    assert [line.rpartition(": ")[2] for line in said] == ["refused", "timeout", "refused"]
    said.clear()
    for at_s, remark in ((0, "odd"), (1, "odd"), (2, ""), (3, "odd"), (4, "odder"), (35, ""), (36, "odder")):
        poller._remark(target, remark, float(at_s))
    assert [line.rpartition(": ")[2] for line in said] == ["odd", "odder", "odder"]
