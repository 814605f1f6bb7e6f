"""A real Kubernetes control plane as processes on loopback: no containers, no kubelet.

    python tools/control_plane.py build     make the programs (CPU minutes, once)
    python tools/control_plane.py up        run it until it is interrupted; says where its kubeconfig is

etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and kwok, which plays nodes and the kubelets on
them: pods get loopback addresses that real processes can listen on.
"""

import json
import os
import resource
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from epp.lab.stack import HOST, free_ports
from tools.control_plane_programs import foreign_crds, programs
from tools.go_programs import BuildError

ETCD, API_SERVER, KWOK = "etcd", "kube-apiserver", "kwok"
CONTROLLERS, SCHEDULER = "kube-controller-manager", "kube-scheduler"
ALL = (ETCD, API_SERVER, CONTROLLERS, SCHEDULER, KWOK)
"""In the order in which they are started."""

ADMIN, NOBODY = "admin", "nobody"
USERS: Mapping[str, str] = {
    ADMIN: "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    KWOK: "system:masters",
    NOBODY: "",
}
"""User with a token of its own -> its group. `NOBODY` is known, and may do nothing."""

KWOK_NODES = "kwok.x-k8s.io/node=fake"
"""Annotation of the nodes that kwok plays."""
POD_RANGE = "127.64.0.0/16"
"""Where kwok takes pod IPs from."""

_CONTROLLERS = (
    *("serviceaccount-controller", "serviceaccount-token-controller", "namespace-controller"),
    "root-ca-certificate-publisher-controller",
    *("garbage-collector-controller", "node-lifecycle-controller", "pod-garbage-collector-controller"),
    *("deployment-controller", "replicaset-controller", "statefulset-controller", "job-controller"),
    *("disruption-controller", "clusterrole-aggregation-controller"),
)
_AUDIT = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
_READY_S = 180.0
_GRACE_S = 3.0
_POLL_S = 0.05
_ANSWER_S = 10.0
_FOR_KUBECTL = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""What kubectl and Helm accept when they ask which kinds there are."""


class ControlPlaneError(Exception):
    """A program did not come up, or kubectl refused; the message ends with what it said last."""


class ObjectRef(msgspec.Struct, rename="camel"):
    """What a request is about."""

    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""


class _Status(msgspec.Struct):
    code: int = 0


class _User(msgspec.Struct):
    username: str = ""


class Asked(msgspec.Struct, rename="camel"):
    """One request to the API server, from its audit log; a watch is there twice, begun and ended."""

    verb: str
    request_uri: str = msgspec.field(name="requestURI")
    stage: str
    user: _User
    object_ref: ObjectRef = msgspec.field(default_factory=ObjectRef)
    response_status: _Status = msgspec.field(default_factory=_Status)

    @property
    def status(self) -> int:
        return self.response_status.code


class ControlPlane:
    """The processes, all of whose files lie in `folder`. `with ControlPlane(...) as plane:`, ready inside.

    Only `start` and `stop`, `wait_ready` and `kubectl` take their time; the latter two may run in any thread.

    Attributes:
        programs: the folder they are in.
        url: of the API server, the same after each restart.
        ca: file with the authority that signed its certificate.
        took_s: how long after `start` each part was ready.
    """

    def __init__(self, folder: Path, binaries: Path, parts: Sequence[str] = ALL) -> None:
        self.folder = folder.resolve()
        self.ca = self.folder / "ca.crt"
        self.took_s: dict[str, float] = {}
        self.programs = binaries
        self._parts = [part for part in ALL if part in parts]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port, self._peer_port, self._port, self._controllers_port, self._scheduler_port = (
            free_ports(5)
        )
        self._tokens = {user: secrets.token_hex(16) for user in USERS}
        self.url = f"https://{HOST}:{self._port}"
        self.port = self._port

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts it whole, or not at all. Raises ControlPlaneError."""
        begun = time.monotonic()
        self._write_files()
        try:
            for part in self._parts:
                self.spawn(part)
                if part in (ETCD, API_SERVER):
                    self.wait_ready(part)
                    self.took_s[part] = time.monotonic() - begun
            self.wait_ready()
            self.took_s["all"] = time.monotonic() - begun
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends it, by force what takes too long; etcd last, or the others hang on it."""
        for part in reversed(self._parts):
            process = self._processes.pop(part, None)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()

    def spawn(self, part: str) -> None:
        """Starts one that is not running, and does not wait for it. Only where the main thread runs.

        The system ends it with the thread that started it, and no other thread is sure to live as long.
        """
        assert threading.current_thread() is threading.main_thread()
        with self.log_of(part).open("ab") as log:
            self._processes[part] = subprocess.Popen(
                [*_gives_way(), *_dies_with_us(), str(self.programs / part), *self._arguments(part)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends one as a crash does; with another signal, as that does: it need not have ended then."""
        process = self._processes[part]
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()

    def revive(self) -> None:
        """Starts again what has ended, and does not wait for it."""
        for part in self._parts:
            if self._processes[part].poll() is not None:
                self.spawn(part)

    def pid(self, part: str) -> int:
        return self._processes[part].pid

    def ready(self, part: str) -> bool:
        """Whether it says that it is. Raises ControlPlaneError where it has ended."""
        if self._processes[part].poll() is not None:
            raise self._failed(part, f"ended with status {self._processes[part].returncode}")
        if part == API_SERVER and not self.ca.exists():
            return self._took_ca()
        return _answers(self._health(part), self.ca)

    def wait_ready(self, *parts: str, timeout_s: float = _READY_S) -> None:
        """Until these are ready, or all of them. Raises ControlPlaneError where one ended, or took longer."""
        deadline = time.monotonic() + timeout_s
        for part in parts or self._parts:
            while not self.ready(part):
                if time.monotonic() > deadline:
                    raise self._failed(part, f"was not ready after {timeout_s:g} s")
                time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- for who talks to it -------------------------------------------------------------------

    def token(self, user: str = ADMIN) -> str:
        return self._tokens[user]

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """The file that gives this user's access."""
        file = self.folder / f"kubeconfig-{user.replace(':', '-')}"
        if not file.exists():
            write_kubeconfig(file, self.url, self.ca, {"token": self.token(user)})
        return file

    def kubectl(self, *arguments: str, stdin: str | None = None, user: str = ADMIN) -> str:
        """What the real kubectl prints. Raises ControlPlaneError with what it complained of."""
        done = subprocess.run(
            [str(self.programs / "kubectl"), f"--kubeconfig={self.kubeconfig(user)}", *arguments],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            # Its cache of what the server offers would go to the home folder.
            env=os.environ | {"KUBECACHEDIR": str(self.folder / "kubectl-cache")},
        )
        if done.returncode:
            raise ControlPlaneError(f"kubectl {' '.join(arguments)}:\n{done.stderr.strip()}")
        return done.stdout

    def apply_crds(self, files: Iterable[Path]) -> None:
        """Applies them as an administrator does, and waits until everybody is told of them, and served."""
        named = [flag for file in files for flag in ("-f", str(file))]
        self.kubectl("apply", "--server-side", *named)
        self.kubectl("wait", "--for=condition=Established", f"--timeout={_READY_S:g}s", *named)
        listed = json.loads(self.kubectl("get", *named, "--output=json"))
        deadline = time.monotonic() + _READY_S
        for crd in listed.get("items", [listed]):
            while not self._serves(crd["spec"]):
                if time.monotonic() > deadline:
                    raise self._failed(API_SERVER, f"does not serve {crd['metadata']['name']}")
                time.sleep(_POLL_S)

    def audit(self, user: str | None = None) -> list[Asked]:
        """What was asked of the API server, in order; by one user, as `system:serviceaccount:ns:name`."""
        decoder = msgspec.json.Decoder(Asked)
        lines = (self.folder / "audit.log").read_bytes().split(b"\n")[:-1]
        named = f'"username":"{user}"'.encode()
        asked = (decoder.decode(line) for line in lines if user is None or named in line)
        return [each for each in asked if user is None or each.user.username == user]

    def log_of(self, part: str) -> Path:
        return self.folder / f"{part}.log"

    # -- inside --------------------------------------------------------------------------------

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        # kube-apiserver takes no EC key in PKCS#8.
        text = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        _write_private(self.folder / "sa.key", text.decode())
        lines = (f'{self._tokens[user]},{user},{user},"{group}"' for user, group in USERS.items())
        _write_private(self.folder / "tokens.csv", "\n".join(lines) + "\n")
        (self.folder / "audit-policy.yaml").write_text(_AUDIT)

    def _took_ca(self) -> bool:
        """kube-apiserver writes its certificate and then the authority's to one file. Clients get the latter
        alone: with both, the authority that the controller manager hands to pods is refused."""
        file, begins = self.folder / "certs" / "apiserver.crt", "-----BEGIN CERTIFICATE-----"
        text = file.read_text() if file.exists() else ""
        if text.count("-----END CERTIFICATE-----") == 2:
            self.ca.write_text(text[text.rindex(begins) :])
        return False

    def _health(self, part: str) -> str:
        return {
            ETCD: f"http://{HOST}:{self._etcd_port}/readyz",
            API_SERVER: f"{self.url}/readyz",
            CONTROLLERS: f"https://{HOST}:{self._controllers_port}/healthz",
            SCHEDULER: f"https://{HOST}:{self._scheduler_port}/readyz",
            KWOK: "",
        }[part]

    def _arguments(self, part: str) -> list[str]:
        made: Mapping[str, Callable[[], list[str]]] = {
            ETCD: self._etcd,
            API_SERVER: self._api_server,
            CONTROLLERS: self._controller_manager,
            SCHEDULER: self._scheduler,
            KWOK: self._kwok,
        }
        return made[part]()

    def _serves(self, spec: Mapping[str, Any]) -> bool:
        """Whether every list of kinds names a CRD's, and they can be listed: some time after Established."""
        group, plural = spec["group"], spec["names"]["plural"]
        versions = [each["name"] for each in spec["versions"] if each["served"]]
        groups = self._get("/apis").get("groups", ())
        known = {each["groupVersion"] for one in groups for each in one["versions"]}
        for_kubectl = {
            (one["metadata"]["name"], each["version"], kind["resource"])
            for one in self._get("/apis", _FOR_KUBECTL).get("items", ())
            for each in one["versions"]
            for kind in each.get("resources", ())
        }
        return all(
            f"{group}/{version}" in known
            and (group, version, plural) in for_kubectl
            and any(
                kind["name"] == plural for kind in self._get(f"/apis/{group}/{version}").get("resources", ())
            )
            and "items" in self._get(f"/apis/{group}/{version}/{plural}?limit=1")
            for version in versions
        )

    def _get(self, path: str, accept: str = "application/json") -> dict[str, Any]:
        """What the API server answers its administrator; nothing where it does not."""
        headers = {"Authorization": f"Bearer {self.token()}", "Accept": accept}
        request = urllib.request.Request(self.url + path, headers=headers)
        context = ssl.create_default_context(cafile=self.ca)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S, context=context) as answer:
                told: dict[str, Any] = json.load(answer)
        except (OSError, HTTPException):
            return {}
        return told

    def _etcd(self) -> list[str]:
        client, peer = f"http://{HOST}:{self._etcd_port}", f"http://{HOST}:{self._peer_port}"
        return [
            *(f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync", "--log-level=warn"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=default={peer}",
        ]

    def _api_server(self) -> list[str]:
        key = self.folder / "sa.key"
        return [
            *(f"--etcd-servers=http://{HOST}:{self._etcd_port}", f"--cert-dir={self.folder}/certs"),
            *(f"--bind-address={HOST}", f"--advertise-address={HOST}", f"--secure-port={self._port}"),
            *("--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16"),
            *("--authorization-mode=RBAC", f"--token-auth-file={self.folder}/tokens.csv"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *(f"--audit-policy-file={self.folder}/audit-policy.yaml", "--audit-log-maxsize=1000"),
            f"--audit-log-path={self.folder}/audit.log",
            *("--allow-privileged=true", "--shutdown-delay-duration=0s", "--profiling=false"),
            # Who makes the default service accounts is the controller manager.
            *([] if CONTROLLERS in self._parts else ["--disable-admission-plugins=ServiceAccount"]),
        ]

    def _controller_manager(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig('system:kube-controller-manager')}",
            *(f"--controllers={','.join(_CONTROLLERS)}", "--leader-elect=false", "--profiling=false"),
            f"--service-account-private-key-file={self.folder}/sa.key",
            *(f"--root-ca-file={self.ca}", "--use-service-account-credentials=true"),
            *(f"--bind-address={HOST}", f"--secure-port={self._controllers_port}"),
        ]

    def _scheduler(self) -> list[str]:
        return [
            *(f"--kubeconfig={self.kubeconfig('system:kube-scheduler')}", "--leader-elect=false"),
            *(f"--bind-address={HOST}", f"--secure-port={self._scheduler_port}", "--profiling=false"),
        ]

    def _kwok(self) -> list[str]:
        return [
            *(f"--kubeconfig={self.kubeconfig(KWOK)}", f"--config={self.programs}/kwok-stages.yaml"),
            *("--manage-all-nodes=false", f"--manage-nodes-with-annotation-selector={KWOK_NODES}"),
            *(f"--cidr={POD_RANGE}", f"--node-ip={HOST}", "--node-lease-duration-seconds=40"),
        ]

    def _failed(self, part: str, what: str) -> ControlPlaneError:
        end = "\n".join(self.log_of(part).read_text(errors="replace").splitlines()[-15:])
        return ControlPlaneError(f"{part} {what}; its last output:\n{end}")


def write_kubeconfig(
    file: Path, url: str, ca: Path, user: Mapping[str, object], namespace: str = "default"
) -> None:
    """A kubeconfig with one context. `user`: how it shows who it is, such as `{"tokenFile": ...}`."""
    context = {"cluster": "lab", "user": "lab", "namespace": namespace}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": url, "certificate-authority": str(ca)}}],
        "users": [{"name": "lab", "user": dict(user)}],
        "contexts": [{"name": "lab", "context": context}],
    }
    _write_private(file, json.dumps(content, indent=1))


def _write_private(file: Path, text: str) -> None:
    """At once: who reads it meanwhile reads what was there before."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(file)


def _answers(url: str, ca: Path) -> bool:
    if not url:
        return True
    context = None
    if url.startswith("https"):
        context = ssl.create_default_context(cafile=ca)
        # Controller manager and scheduler sign their own certificates.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def _gives_way() -> list[str]:
    """What starts here takes all there is for seconds; what is tested has machines of its own elsewhere."""
    return ["nice", "-n", "5"] if shutil.which("nice") else []


def _dies_with_us() -> list[str]:
    """A run that is killed leaves nothing behind, where the system can see to it."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


@click.group()
def main() -> None:
    """Build or run a Kubernetes control plane on loopback."""


@main.command()
def build() -> None:
    """Make the programs, and fetch the CRDs of others."""
    begun, spent = time.monotonic(), _child_cpu_s()
    try:
        folder = programs(lambda text: print(text, flush=True))
        foreign_crds()
    except BuildError as error:
        sys.exit(f"control plane: {error}")
    print(f"{folder}: {time.monotonic() - begun:.0f} s, {_child_cpu_s() - spent:.0f} s of CPU")


@main.command()
@click.option(
    "--data", type=click.Path(path_type=Path), help="Where its files go; by default to a new folder."
)
def up(data: Path | None) -> None:
    """Run it until it is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="control-plane-") as scratch, suppress(KeyboardInterrupt):
        try:
            with ControlPlane(data or Path(scratch), programs(print)) as plane:
                took = ", ".join(f"{part} {took_s:.1f} s" for part, took_s in plane.took_s.items())
                print(f"ready ({took})\nexport KUBECONFIG={plane.kubeconfig()}", flush=True)
                signal.pause()
        except (BuildError, ControlPlaneError) as error:
            sys.exit(f"control plane: {error}")


def _child_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
