"""What a release of Envoy Gateway is made of, of the module that `tools/gateways.py` pins."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.gateways import ENVOY_GATEWAY, built, found, module_folder, version

_CHART: Final = "charts/gateway-helm"
_CRDS: Final = f"{_CHART}/charts/crds/crds"


@dataclass(frozen=True, slots=True)
class EnvoyGateway:
    """What its release is made of.

    Attributes:
        version: as of the module, `v1.9.1`.
        program: the control plane, and what makes its certificates.
        chart: folder of the Helm chart, whose values are those of this version.
        crds: files with the CRDs of Gateway API and its own.
    """

    version: str
    program: Path
    chart: Path
    crds: tuple[Path, ...]


def envoy_gateway() -> EnvoyGateway:
    """Built where the cache has none. Raises BuildError: see `tools.gateways.built`."""
    program = built(ENVOY_GATEWAY)
    files = program.parent / "files"
    if not files.exists():
        _take_files(files)
    crds = tuple(sorted((files / "crds").rglob("*.yaml")))
    return EnvoyGateway(version(ENVOY_GATEWAY), program, files / "chart", crds)


def found_envoy_gateway() -> EnvoyGateway | None:
    """The same where it has been built, else None."""
    return envoy_gateway() if found(ENVOY_GATEWAY) else None


def _take_files(files: Path) -> None:
    """The chart and the CRDs of the module; its values are a template for whoever makes a release."""
    module = module_folder(ENVOY_GATEWAY)
    with tempfile.TemporaryDirectory(dir=files.parent) as scratch:
        fresh = Path(scratch, "files")
        for name, source in (("chart", _CHART), ("crds", _CRDS)):
            # The module's own files cannot be written, nor can copies that keep their modes.
            shutil.copytree(module / source, fresh / name, copy_function=shutil.copyfile)
        for each in (fresh, *fresh.rglob("*/")):
            each.chmod(0o755)
        template = (fresh / "chart" / "values.tmpl.yaml").read_text()
        image = f"envoyproxy/gateway:{version(ENVOY_GATEWAY)}"
        values = template.replace("${GatewayImage}", image)
        values = values.replace("${GatewayImagePullPolicy}", "IfNotPresent")
        (fresh / "chart" / "values.yaml").write_text(values)
        fresh.replace(files)
