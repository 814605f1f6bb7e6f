"""Who a picker is in Kubernetes: a service account with Roles, and the files that show it."""

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from e2e.kube_client import KubeClient, Thing, path_of
from e2e.pages import until
from tools.control_plane import ControlPlane, write_kubeconfig

SERVICE_ACCOUNT_FOLDER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
LEAST_TOKEN_S: Final = 600
"""No token is given for less."""

_GROUP = "rbac.authorization.k8s.io"
_REVIEWS = "authorization.k8s.io/v1"


def rule(groups: str | Sequence[str], resources: str | Sequence[str], verbs: str, **also: object) -> Thing:
    """One rule of a Role; several verbs separated by blanks."""
    return {
        "apiGroups": [groups] if isinstance(groups, str) else list(groups),
        "resources": [resources] if isinstance(resources, str) else list(resources),
        "verbs": verbs.split(),
        **also,
    }


@dataclass
class Access:
    """A service account: `await Access(...).create(rules)`, then `kubeconfig` or `in_cluster`.

    Attributes:
        folder: for its files; its own.
        file: that holds the token, and gets another with `rotate`.
    """

    plane: ControlPlane
    client: KubeClient
    namespace: str
    folder: Path
    name: str = "picker"
    token: str = field(init=False, default="")
    _bound_to: str = field(init=False, default="")
    _count: int = field(init=False, default=0)

    @property
    def user(self) -> str:
        """Its name in the audit log."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    @property
    def file(self) -> Path:
        return self.folder / "token"

    async def create(self, rules: Sequence[Thing] = (), cluster_rules: Sequence[Thing] = ()) -> Self:
        """Makes the account; `rules` hold in its namespace, `cluster_rules` everywhere."""
        await self.client.create(self._thing("v1", "ServiceAccount"))
        if rules:
            await self.allow(rules)
        if cluster_rules:
            await self.allow(cluster_rules, everywhere=True)
        return await self.rotate()

    async def allow(self, rules: Sequence[Thing], *, everywhere: bool = False) -> None:
        """Gives it one more role, and waits until it counts.

        Roles of the cluster are named by the namespace, and outlive it.
        """
        self._count += 1
        prefix, name = "Cluster" if everywhere else "", f"{self.namespace}-{self.name}-{self._count}"
        role = self._thing(f"{_GROUP}/v1", f"{prefix}Role", name) | {"rules": list(rules)}
        binding = self._thing(f"{_GROUP}/v1", f"{prefix}RoleBinding", name) | {
            "roleRef": {"apiGroup": _GROUP, "kind": f"{prefix}Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": self.name, "namespace": self.namespace}],
        }
        await self.client.create(role)
        await self.client.create(binding)
        # The API server learns of roles by watching them.
        within = "" if everywhere else self.namespace
        await until(lambda: self._has(rules, within), f"the API server knows of the role {name}")

    async def _has(self, rules: Sequence[Thing], namespace: str) -> bool:
        """Whether it may do one thing at least that each rule allows."""
        return all([await self._may(each, namespace) for each in rules])

    async def _may(self, rule: Thing, namespace: str) -> bool:
        spec: Thing = {"user": self.user}
        if paths := rule.get("nonResourceURLs"):
            spec["nonResourceAttributes"] = {"path": paths[0], "verb": rule["verbs"][0]}
        else:
            resource, _, subresource = rule["resources"][0].partition("/")
            spec["resourceAttributes"] = {
                **{"namespace": namespace, "group": rule["apiGroups"][0], "verb": rule["verbs"][0]},
                **{"resource": resource, "subresource": subresource},
                "name": next(iter(rule.get("resourceNames", ())), ""),
            }
        kind = "SubjectAccessReview"
        review = {"apiVersion": _REVIEWS, "kind": kind, "spec": spec}
        answer = await self.client.call("POST", path_of(_REVIEWS, kind), review)
        return bool(answer["status"]["allowed"])

    async def rotate(self) -> Self:
        """A new token in `file`. The one before stays valid until `revoke`."""
        self._count += 1
        holder = self._thing("v1", "Secret", f"{self.name}-token-{self._count}")
        made = await self.client.create(holder)
        reference = {"kind": "Secret", "apiVersion": "v1", "name": holder["metadata"]["name"]}
        spec = {
            "expirationSeconds": LEAST_TOKEN_S,
            "boundObjectRef": {**reference, "uid": made["metadata"]["uid"]},
        }
        path = path_of("v1", "ServiceAccount", self.namespace, self.name, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        self.token = (await self.client.call("POST", path, body))["status"]["token"]
        self._bound_to = reference["name"]
        self._write()
        return self

    async def revoke(self) -> None:
        """The newest token counts no more, as soon as the API server forgets it: within 10 s."""
        await self.client.delete(path_of("v1", "Secret", self.namespace, self._bound_to))

    @property
    def expires_s(self) -> float:
        """When the newest token ends, in seconds since the epoch."""
        middle = self.token.split(".")[1]
        content = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
        return float(content["exp"])

    def kubeconfig(self) -> Path:
        """A kubeconfig that names the token's file."""
        path = self.folder / "kubeconfig"
        user = {"tokenFile": str(self.file)}
        write_kubeconfig(path, self.plane.url, self.plane.ca, user, self.namespace)
        return path

    def in_cluster(self) -> tuple[Path, dict[str, str]]:
        """The folder a pod finds at `SERVICE_ACCOUNT_FOLDER`, and the variables that go with it."""
        (self.folder / "ca.crt").write_bytes(self.plane.ca.read_bytes())
        (self.folder / "namespace").write_text(self.namespace)
        return self.folder, {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.plane.port),
        }

    def _thing(self, api_version: str, kind: str, name: str = "") -> Thing:
        metadata = {"name": name or self.name}
        if not kind.startswith("Cluster"):
            metadata["namespace"] = self.namespace
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata}

    def _write(self) -> None:
        """At once, by way of a link, as a kubelet does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.folder / f"..{self._count}"
        data.mkdir()
        (data / "token").write_text(self.token)
        fresh = self.folder / "..fresh"
        fresh.symlink_to(data.name)
        fresh.replace(self.folder / "..data")
        if not self.file.is_symlink():
            os.symlink("..data/token", self.file)


def in_own_mounts(command: Sequence[str], folder: Path) -> list[str]:
    """The command, run where `folder` is what a pod finds at `SERVICE_ACCOUNT_FOLDER`; needs to be root.

    The mounts are the child's own, and go with it.
    """
    made = (
        f"mount -t tmpfs -o size=1m none /run && mkdir -p {SERVICE_ACCOUNT_FOLDER} && "
        f'mount --bind "$0" {SERVICE_ACCOUNT_FOLDER} && exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", made, str(folder), *command]
