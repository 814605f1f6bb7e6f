"""The programs of a Kubernetes control plane and CRDs of others, made from Go modules into the user's cache.

`tools/control_plane/` pins the programs, `tools/control_plane/crds/` the modules whose CRDs are read as
files. A cold build takes CPU minutes, so it keeps what it has compiled until the last program is made: a
build that was killed goes on where it stopped.
"""

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.go_programs import BuildError, cache_folder, go, go_missing

PINS = Path(__file__).with_name("control_plane")
CRD_PINS = PINS / "crds"
STAGES = PINS / "stages.yaml"

PROGRAMS: Mapping[str, str] = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
}
"""Program -> package that makes it."""

FOREIGN_CRDS: Mapping[str, tuple[str, str]] = {
    "httproutes.gateway.networking.k8s.io": (
        "sigs.k8s.io/gateway-api",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
    "servicemonitors.monitoring.coreos.com": (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
    "destinationrules.networking.istio.io": (
        "istio.io/api",
        "kubernetes/customresourcedefinitions.gen.yaml",
    ),
}
"""Name of the CRD -> module and the file in it that holds it, perhaps among others."""

# Neither inlining nor debug data: a third less to compile, and the programs run well enough for tests.
_FLAGS = ("-trimpath", "-gcflags=all=-l -dwarf=false")
_STAGE_FILES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-complete.yaml",
)

Say = Callable[[str], None]


def pinned(module: str) -> str:
    """Version of a module of the programs; raises KeyError."""
    pins: list[tuple[str, str]] = re.findall(r"^\s+(\S+) (v\S+)", (PINS / "go.mod").read_text(), re.MULTILINE)
    return dict(pins)[module]


def programs(say: Say = lambda _: None) -> Path:
    """The folder that holds `PROGRAMS` and `kwok-stages.yaml`; builds what the cache has not.

    Raises:
        BuildError: Go is missing, or refused; the message says why.
    """
    if missing := go_missing():
        raise BuildError(missing)
    folder = programs_folder()
    with _alone(folder.parent):
        todo = [name for name in PROGRAMS if not (folder / name).exists()]
        objects = folder.parent / "objects"
        for count, name in enumerate(todo, 1):
            say(f"building {name} ({count} of {len(todo)})")
            _build(name, folder, objects)
        if not (folder / "kwok-stages.yaml").exists():
            _write(folder / "kwok-stages.yaml", _stages())
        if todo:
            shutil.rmtree(objects, ignore_errors=True)
    return folder


def programs_folder() -> Path:
    """Where `programs` puts them; it may be empty or missing."""
    return _folder("bin", PINS, [*PROGRAMS.values(), *_FLAGS, *_STAGE_FILES, go(PINS, "version")])


def found_programs() -> Path | None:
    """The folder with all programs where they have been built, else None."""
    if go_missing():
        return None
    folder = programs_folder()
    whole = all((folder / name).exists() for name in (*PROGRAMS, "kwok-stages.yaml"))
    return folder if whole else None


def foreign_crds() -> tuple[Path, ...]:
    """A file for each of `FOREIGN_CRDS`; modules are fetched where the cache has none.

    Raises:
        BuildError: as it says.
    """
    if missing := go_missing():
        raise BuildError(missing)
    folder = _folder("crds", CRD_PINS, [f"{name} {place}" for name, place in FOREIGN_CRDS.items()])
    files = tuple(folder / f"{name}.yaml" for name in FOREIGN_CRDS)
    with _alone(folder.parent):
        for file, (name, (module, path)) in zip(files, FOREIGN_CRDS.items(), strict=True):
            if not file.exists():
                _write(file, _document(Path(_module_folder(CRD_PINS, module), path).read_text(), name))
    return files


def _folder(kind: str, pins: Path, also: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(also).encode())
    for name in ("go.mod", "go.sum"):
        digest.update((pins / name).read_bytes())
    return cache_folder() / "control-plane" / f"{kind}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: two that build the same take twice as long, and memory for two."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, folder: Path, objects: Path) -> None:
    version = pinned("k8s.io/kubernetes")
    major, minor = version.removeprefix("v").split(".")[:2]
    stamp = "k8s.io/component-base/version."
    values = {
        f"{stamp}gitVersion": version,
        f"{stamp}gitMajor": major,
        f"{stamp}gitMinor": minor,
        "sigs.k8s.io/kwok/pkg/consts.Version": pinned("sigs.k8s.io/kwok"),
    }
    stamps = " ".join(f"-X {key}={value}" for key, value in values.items())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch, name)
        arguments = (*_FLAGS, f"-ldflags=-s -w {stamps}", "-o", str(fresh), PROGRAMS[name])
        go(PINS, "build", "-mod=readonly", *arguments, CGO_ENABLED="0", GOCACHE=str(objects))
        fresh.replace(folder / name)


def _stages() -> str:
    """What kwok does with nodes and pods: its own stages, and ours for pods that become ready and go."""
    folder = Path(_module_folder(PINS, "sigs.k8s.io/kwok"), "kustomize/stage")
    return "\n---\n".join([*((folder / file).read_text() for file in _STAGE_FILES), STAGES.read_text()])


def _document(text: str, name: str) -> str:
    """The one of several YAML documents whose `metadata.name` this is."""
    found = [
        each for each in re.split(r"^---\s*$", text, flags=re.MULTILINE) if f"\n  name: {name}\n" in each
    ]
    if len(found) != 1:
        raise BuildError(f"{len(found)} documents instead of one are named {name}")
    return found[0]


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def _module_folder(pins: Path, module: str) -> str:
    folder: str = json.loads(go(pins, "mod", "download", "-json", module))["Dir"]
    return folder
