"""Whether a picker in Kubernetes says that it can serve its pool."""

from types import SimpleNamespace
from typing import Any, cast

from epp.payload.apis import ParserSet
from epp.runtime.health import Health
from epp.runtime.in_cluster import InCluster, Tells
from epp.runtime.kube.api import KubeApi
from epp.runtime.options import Options
from epp.runtime.reload import Running


def followed(*parsers: str) -> tuple[InCluster, Health, Any]:
    """Of a pool, its health and the configuration in use."""
    running = SimpleNamespace(heard_by=[], plugins=SimpleNamespace(parsers=ParserSet(parsers)))
    health = Health()
    tells = Tells(lambda _: None, lambda _: None, cast("Running", running))
    options = Options(pool_name="pool", pool_namespace="ns")
    return InCluster(cast("KubeApi", SimpleNamespace()), options, health, tells), health, running


def test_a_pool_is_served_that_some_parser_can_read() -> None:
    cluster, health, _ = followed("vllmgrpc-parser")
    for protocol, fits in (("http", False), ("kubernetes.io/h2c", True), ("", True), ("other", False)):
        cluster.pool(True, protocol)
        assert health.ready == fits
    cluster.pool(False, "")
    assert not health.ready


def test_other_parsers_are_held_against_the_pool_that_is_known() -> None:
    cluster, health, running = followed("vllmgrpc-parser")
    (hear,) = running.heard_by
    cluster.pool(True, "http")
    for parsers, fits in ((["openai-parser"], True), (["vllmgrpc-parser"], False)):
        running.plugins.parsers = ParserSet(parsers)
        hear()
        assert health.ready == fits
    cluster.pool(False, "")
    running.plugins.parsers = ParserSet(["openai-parser"])
    hear()
    assert not health.ready, "there is no pool"
