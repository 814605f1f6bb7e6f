"""What the control plane's tools do without Go and without a control plane."""

import json
from pathlib import Path

import msgspec
import pytest

from e2e.kube_access import rule
from e2e.kube_client import path_of
from e2e.kube_rights import Right, judged
from tools import control_plane_programs
from tools.control_plane import Asked, ControlPlane, write_kubeconfig
from tools.control_plane_programs import found_programs, pinned, programs
from tools.go_programs import BuildError

RULES = [rule("", "pods", "list watch"), rule("llm-d.ai", ["a", "a/status"], "patch")]


def asked(
    verb: str, uri: str, group: str = "", resource: str = "", subresource: str = "", code: int = 200
) -> dict[str, object]:
    reference = {"resource": resource, "subresource": subresource, "apiGroup": group}
    return {
        "verb": verb,
        "requestURI": uri,
        "stage": "ResponseComplete",
        "user": {"username": "system:serviceaccount:ns:picker", "groups": ["all"]},
        "responseStatus": {"metadata": {}, "code": code},
        **({"objectRef": reference} if resource else {}),
    }


WHOLE = [
    asked("list", "/api/v1/namespaces/ns/pods", "", "pods"),
    asked("watch", "/api/v1/namespaces/ns/pods?watch=1", "", "pods"),
    asked("patch", "/apis/llm-d.ai/v1/namespaces/ns/a/x", "llm-d.ai", "a"),
    asked("patch", "/apis/llm-d.ai/v1/namespaces/ns/a/x/status", "llm-d.ai", "a", "status"),
    asked("get", "/apis/llm-d.ai/v1"),
]


def judge(log: list[dict[str, object]]) -> tuple[set[Right], set[Right]]:
    return judged(RULES, msgspec.convert(log, list[Asked]))


def test_rights_that_are_all_used() -> None:
    assert judge(WHOLE) == (set(), set())


@pytest.mark.parametrize(
    ("log", "unused", "refused"),
    [
        (WHOLE[1:], {Right("", "pods", "list")}, set()),
        (WHOLE[:3], {Right("llm-d.ai", "a/status", "patch")}, set()),
        ([*WHOLE, asked("get", "/x", "", "secrets", code=403)], set(), {Right("", "secrets", "get")}),
        ([*WHOLE, asked("get", "/x", "", "secrets")], set(), {Right("", "secrets", "get")}),
        ([*WHOLE, asked("get", "/metrics", code=403)], set(), {Right(None, "/metrics", "get")}),
        (
            [*WHOLE[1:], asked("list", "/x", "", "pods", code=403)],
            {Right("", "pods", "list")},
            {Right("", "pods", "list")},
        ),
    ],
)
def test_rights_that_are_too_many_or_too_few(
    log: list[dict[str, object]], unused: set[Right], refused: set[Right]
) -> None:
    assert judge(log) == (unused, refused)


def test_paths() -> None:
    assert path_of("v1", "Pod", "ns", "a", "status") == "/api/v1/namespaces/ns/pods/a/status"
    assert path_of("networking.k8s.io/v1", "NetworkPolicy") == "/apis/networking.k8s.io/v1/networkpolicies"
    assert path_of("v1", "Node", "ns", "a") == "/api/v1/nodes/a"


def test_a_kubeconfig_is_private_and_names_the_tokens_file(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    write_kubeconfig(file, "https://127.0.0.1:1", tmp_path / "ca.crt", {"tokenFile": "/t"}, "ns")
    content = json.loads(file.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    assert content["users"][0]["user"] == {"tokenFile": "/t"}
    assert content["contexts"][0]["context"]["namespace"] == "ns"


def test_the_audit_log_is_read_by_user_and_without_a_line_that_is_being_written(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, tmp_path)
    other = {**WHOLE[0], "user": {"username": "other"}}
    lines = [json.dumps(each, separators=(",", ":")) for each in (WHOLE[0], other)]
    (tmp_path / "audit.log").write_text("\n".join(lines) + '\n{"verb":')
    assert len(plane.audit()) == 2
    (found,) = plane.audit("other")
    assert (found.verb, found.object_ref.resource, found.status) == ("list", "pods", 200)


def test_what_is_not_built_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert found_programs() is None
    assert list(tmp_path.iterdir()) == []


def test_without_go_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane_programs, "go_missing", lambda: "no Go here")
    assert found_programs() is None
    with pytest.raises(BuildError, match="no Go here"):
        programs()


def test_all_of_kubernetes_is_of_one_version() -> None:
    minor, patch = pinned("k8s.io/kubernetes").removeprefix("v1.").split(".")
    for module in ("k8s.io/api", "k8s.io/client-go", "k8s.io/apiserver"):
        assert pinned(module) == f"v0.{minor}.{patch}"


def test_one_document_of_several() -> None:
    text = "a: 1\nmetadata:\n  name: x\n---\nmetadata:\n  name: y\nb: 2\n"
    assert control_plane_programs._document(text, "y") == "\nmetadata:\n  name: y\nb: 2\n"
    with pytest.raises(BuildError, match="0 documents"):
        control_plane_programs._document(text, "z")
