"""The image's configuration for conformance tests of gateways, and the patch that turns it on."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from epp.scheduling.served import SERVED_HEADER
from tests.data.compat import line
from tests.data.kube import arguments, kustomize

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "manifests/conformance/config.yaml").read_text()
SELECTION = "test-epp-endpoint-selection"
BODY = b'{"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}'
P, Line = line.P, line.Line


def pool(*host_ports: str) -> Any:
    return Line(*(P(host_port=each) for each in host_ports), config=CONFIG)


PODS = ("10.0.0.1:3000", "10.0.0.2:3000", "10.0.0.3:3000")
RANKS = tuple(f"10.0.0.{pod}:{port}" for pod in (1, 2, 3) for port in (3000, 3002, 3004))


def picked(where: Any, selection: str, times: int = 30) -> set[str]:
    """Destinations of as many requests with this header."""
    headers = {SELECTION: selection} if selection else {}
    return {where.ask(BODY, path="/primary-gateway-test", headers=headers).destination for _ in range(times)}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("10.0.0.2", {"10.0.0.2:3000"}),
        ("10.0.0.2:3000", {"10.0.0.2:3000"}),
        ("10.0.0.1,10.0.0.3", {"10.0.0.1:3000", "10.0.0.3:3000"}),
        ("10.0.0.1,10.0.0.2,10.0.0.3", set(PODS)),
        # Of two pools' pods only the own ones count.
        ("10.0.0.1,10.0.9.1,10.0.9.2", {"10.0.0.1:3000"}),
        ("", set(PODS)),
    ],
)
def test_a_request_goes_only_where_it_says(selection: str, expected: set[str]) -> None:
    assert picked(pool(*PODS), selection) == expected


def test_ranks_are_chosen_by_port() -> None:
    assert picked(pool(*RANKS), "10.0.0.1,10.0.0.3:3002") == {"10.0.0.1:3000", "10.0.0.3:3002"}
    assert picked(pool(*RANKS), "10.0.0.2:3000,10.0.0.2:3004") <= {"10.0.0.2:3000", "10.0.0.2:3004"}


def test_a_pod_of_another_pool_is_refused() -> None:
    asked = pool(*PODS).ask(BODY, headers={SELECTION: "10.0.9.1"})
    assert asked.refusal[0] == 429


def test_a_request_without_body_is_served() -> None:
    where = pool(*PODS)
    assert {where.ask(method="GET", path="/primary").destination for _ in range(30)} == set(PODS)
    chosen = {SELECTION: "10.0.0.2"}
    assert where.ask(method="GET", path="/primary", headers=chosen).destination == "10.0.0.2:3000"


@pytest.mark.parametrize("body", [BODY, b"", b"no JSON", b"\x00" * 100_000])
def test_bodies_pass_unread(body: bytes) -> None:
    where = pool(*PODS)
    asked = where.ask(body[:10], body[10:], path="/any/path")
    assert asked.body("request") == body
    asked.answer(b'{"path": "/any/path"}', served=asked.destination)
    assert asked.body("response") == b'{"path": "/any/path"}'
    assert where.idle


def answer_headers(served: str | None, engine: str | None = None) -> dict[str, str]:
    asked = pool(*PODS).ask(BODY, headers={SELECTION: "10.0.0.1"})
    said = {} if engine is None else {SERVED_HEADER: engine}
    asked.answer(b"{}", served=served, headers=said)
    return dict(asked.answer_head["set"])


def test_who_served_is_what_the_gateway_says() -> None:
    assert answer_headers("10.0.0.2:3000")[SERVED_HEADER] == "10.0.0.2:3000"
    # Neither the picker's choice nor what an engine says stands in.
    assert answer_headers(None)[SERVED_HEADER].startswith("fail:")
    assert answer_headers(None, "10.0.0.1:3000")[SERVED_HEADER].startswith("fail:")
    assert answer_headers("10.0.0.2:3000", "10.0.0.1:3000")[SERVED_HEADER] == "10.0.0.2:3000"


def _all_is_well() -> None:
    assert picked(pool(*PODS), "") == set(PODS)
    assert picked(pool(*PODS), "10.0.0.2") == {"10.0.0.2:3000"}
    test_who_served_is_what_the_gateway_says()
    test_bodies_pass_unread(b"no JSON")


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("parameters: {passWithoutHeader: true}", "parameters: {passWithoutHeader: false}"),
        ("  - pluginRef: header-based-testing-filter\n", ""),
        ("- type: destination-endpoint-served-verifier\n", ""),
        ("passthrough-parser", "openai-parser"),
    ],
)
def test_each_line_is_needed(part: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert part in CONFIG
    monkeypatch.setitem(globals(), "CONFIG", CONFIG.replace(part, instead))
    with pytest.raises((AssertionError, ValueError, KeyError)):
        _all_is_well()


# -- the patch ------------------------------------------------------------------------------------------


def patched(folder: Path, script: str) -> list[dict[str, Any]]:
    """Deployments of the suite after the commands of docs/conformance.md."""
    file = folder / "conformance/resources/base.yaml"
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / "tests/data/kube/conformance-pickers.yaml").read_text())
    subprocess.run(["sh", "-euc", script], cwd=folder, check=True)
    return kustomize.read(file)


def script() -> str:
    (found,) = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "docs/conformance.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_the_patch_is_the_image_and_one_argument(tmp_path: Path) -> None:
    before = kustomize.read(ROOT / "tests/data/kube/conformance-pickers.yaml")
    after = patched(tmp_path, script())
    image, argument = "warmroute/warmroute:0.1.0", "--config-file=/etc/warmroute/conformance.yaml"
    for old in before[:2]:
        (container,) = old["spec"]["template"]["spec"]["containers"]
        given = container["args"]
        if "--config-file" in given:
            del given[given.index("--config-file") :]
        container.update(image=image, args=[argument, *given])
    assert after == before
    deployed = kustomize.render(ROOT / "manifests/overlays/gateway")
    (ours,) = [each for each in deployed if each["kind"] == "Deployment"]
    assert ours["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_the_picker_takes_the_suites_arguments(tmp_path: Path) -> None:
    for deployment in patched(tmp_path, script())[:2]:
        given = arguments.options(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
        assert list(given.problems()) == []
        assert given.pool_name.endswith("-inference-pool")
        assert given.pool_namespace == "inference-conformance-app-backend"
        assert (given.grpc_port, given.grpc_health_port, given.v) == (9002, 9003, 4)
        assert (given.zap_encoder, given.secure_serving) == ("json", True)
        assert given.config_file == "/etc/warmroute/conformance.yaml"
