"""Files of a pod's volumes, written as a kubelet writes them."""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from e2e.kube_client import KubeClient, Refused, Thing, path_of
from e2e.pages import until

Edit = Callable[[str, bytes], bytes]
"""Name of a volume and content of a file in it -> what is written."""

_TOKEN_API: Final = "authentication.k8s.io/v1"
_KEYED: Final = re.compile(r"metadata\.(annotations|labels)\['(.+)'\]")


@dataclass
class Volumes:
    """Of one pod: ConfigMaps, Secrets, empty folders, and projections with a token of its service account."""

    client: KubeClient
    pod: Thing
    folder: Path
    edit: Edit
    _writes: int = field(init=False, default=0)

    def at(self, volume: str) -> Path:
        return self.folder / volume

    async def write(self) -> None:
        """All of them; again later, as they are then."""
        self._writes += 1
        for volume in self.pod["spec"].get("volumes", ()):
            name = volume["name"]
            content = await self._content(volume)
            files = {file: self.edit(name, text) for file, text in content.items()}
            swap(self.at(name), files, self._writes)

    async def _content(self, volume: Thing) -> dict[str, bytes]:
        match volume:
            case {"configMap": {"name": name}}:
                return await self._config_map(name)
            case {"secret": {"secretName": name}}:
                secret = await self._get("Secret", name)
                return {key: base64.b64decode(text) for key, text in secret["data"].items()}
            case {"projected": {"sources": sources}}:
                parts = [await self._source(source) for source in sources]
                return {file: content for part in parts for file, content in part.items()}
            case {"emptyDir": _}:
                return {}
        raise AssertionError(f"no volume of this kind is known here: {volume}")

    async def _source(self, source: Thing) -> dict[str, bytes]:
        match source:
            case {"serviceAccountToken": {"path": path, "expirationSeconds": seconds}}:
                return {path: (await self._token(seconds)).encode()}
            case {"configMap": {"name": name, "items": items}}:
                content = await self._config_map(name)
                return {item["path"]: content[item["key"]] for item in items}
            case {"downwardAPI": {"items": items}}:
                return {item["path"]: field_of(self.pod, item["fieldRef"]).encode() for item in items}
        raise AssertionError(f"nothing is known here of this source: {source}")

    async def _config_map(self, name: str) -> dict[str, bytes]:
        found = await self._get("ConfigMap", name)
        return {key: text.encode() for key, text in found["data"].items()}

    async def _get(self, kind: str, name: str) -> Thing:
        path = path_of("v1", kind, self.pod["metadata"]["namespace"], name)

        async def is_there() -> bool:
            try:
                await self.client.get(path)
            except Refused as refused:
                if refused.status != 404:
                    raise
                return False
            return True

        await until(is_there, f"{kind} {name}, which pod {self.pod['metadata']['name']} mounts, is there")
        return await self.client.get(path)

    async def _token(self, seconds: int) -> str:
        """Good as long as the pod is there."""
        metadata = self.pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "apiVersion": _TOKEN_API,
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds, "boundObjectRef": bound},
        }
        account = self.pod["spec"]["serviceAccountName"]
        path = path_of("v1", "ServiceAccount", metadata["namespace"], account, "token")
        token: str = (await self.client.call("POST", path, body))["status"]["token"]
        return token


def field_of(pod: Thing, reference: Thing) -> str:
    """What a `fieldRef` says; of an annotation or label that is not there, nothing."""
    path: str = reference["fieldPath"]
    if keyed := _KEYED.fullmatch(path):
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    value = pod
    for part in path.split("."):
        value = value[part]
    return str(value)


def swap(folder: Path, files: Mapping[str, bytes], number: int) -> None:
    """Puts files in place of those that were there, all at once: what they are reached by is one link."""
    data = folder / f"..{number}"
    data.mkdir(parents=True)
    for name, content in files.items():
        (data / name).write_bytes(content)
    fresh = folder / "..fresh"
    fresh.symlink_to(data.name)
    fresh.replace(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
