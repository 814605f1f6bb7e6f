"""Certificates of a picker, and the authority that signed them."""

import base64
from pathlib import Path
from tempfile import TemporaryDirectory

from e2e.kube_client import Thing
from tests.data.tls.authority import Authority

SECRET = "warmroute-epp-tls"
"""With the picker's certificate, for the chart's `router.epp.tls.secretName`."""
AUTHORITY = "warmroute-epp-ca"
"""With `ca.crt`, for `provider.envoyGateway.tls.caConfigMap`."""


def signed(name: str) -> list[Thing]:
    """An authority of its own in `AUTHORITY`, and in `SECRET` a certificate for this host that it signed."""
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        certificate, key = authority.issue("picker", name)
        files = {"tls.crt": Path(certificate).read_bytes(), "tls.key": Path(key).read_bytes()}
        ca = Path(authority.ca).read_text()
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": AUTHORITY},
            "data": {"ca.crt": ca},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": SECRET},
            "data": {file: base64.b64encode(text).decode() for file, text in files.items()},
        },
    ]
