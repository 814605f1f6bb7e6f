"""Write the standalone overlay's envoy.yaml from the package's configuration (`--check`: only compare)."""

import sys
from pathlib import Path

from epp import names
from epp.lab.envoy import PickerAddress, envoy_config

ROOT = Path(__file__).resolve().parents[1]
ENVOY = "manifests/overlays/standalone/envoy.yaml"
ENVOY_PORT = 8081
ENVOY_ADMIN_PORT = 19000
LOOPBACK = "127.0.0.1"


def standalone_envoy() -> str:
    """Of the proxy in the picker's pod. It fails closed: it knows no endpoint but those the picker names."""
    return envoy_config(
        listen_host="0.0.0.0",
        listen_port=ENVOY_PORT,
        admin_port=ENVOY_ADMIN_PORT,
        pickers=[PickerAddress(LOOPBACK, names.GRPC_PORT, names.GRPC_HEALTH_PORT)],
        endpoints=[],
        fail_open=False,
    )


def stale(root: Path) -> bool:
    """Whether the file under `root` is not what would be written."""
    file = root / ENVOY
    return not file.exists() or file.read_text(encoding="utf-8") != standalone_envoy()


def main(*options: str) -> None:
    if "--check" not in options:
        (ROOT / ENVOY).write_text(standalone_envoy(), encoding="utf-8")
    elif stale(ROOT):
        sys.exit(f"{ENVOY} is not what the package makes; write it anew with: python tools/manifests.py")


if __name__ == "__main__":
    main(*sys.argv[1:])
