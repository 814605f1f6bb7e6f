"""`/metrics` over TLS: who gets in, who does not, and who cannot hold up the others."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from epp.errors import ConfigError
from epp.lab.stack import free_ports
from epp.runtime.metrics import Metrics
from epp.runtime.metrics_server import check_metrics_tls, serve_metrics
from epp.runtime.tls import self_signed

DEADLINE_S = 60.0


def pair(folder: Path) -> Path:
    """A new certificate in its own folder, signed by itself."""
    folder.mkdir()
    made = self_signed()
    (folder / "tls.key").write_bytes(made.key)
    (folder / "tls.crt").write_bytes(made.chain)
    return folder


@contextmanager
def serving(folder: Path, client_ca_file: str = "") -> Iterator[int]:
    (port,) = free_ports(1)
    registry = Metrics("p", ("", "0.1.0")).registry
    close = serve_metrics(registry, "127.0.0.1", port, str(folder), client_ca_file)
    try:
        yield port
    finally:
        close()


def client(shown: Path | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    if shown is not None:
        context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
    return context


def page(port: int, context: ssl.SSLContext) -> bytes:
    connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_metrics_over_tls(version: ssl.TLSVersion, tmp_path: Path) -> None:
    with serving(pair(tmp_path / "server")) as port:
        assert b"llm_d_epp_info" in page(port, client(version=version))


def test_only_who_shows_a_certificate_of_the_authority_gets_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known, stranger = pair(tmp_path / "known"), pair(tmp_path / "stranger")
    with serving(pair(tmp_path / "server"), str(known / "tls.crt")) as port:
        assert b"llm_d_epp_info" in page(port, client(known))
        for context in (client(), client(stranger)):
            with pytest.raises(OSError):  # noqa: PT011 - where it breaks off is for the two sides' timing
                page(port, context)
        assert b"llm_d_epp_info" in page(port, client(known)), "refusals cost nobody else anything"
    assert "Traceback" not in capfd.readouterr().err


def test_a_silent_client_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with (
        serving(pair(tmp_path / "server")) as port,
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as silent,
    ):
        assert b"llm_d_epp_info" in page(port, client())
        silent.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    server = pair(tmp_path / "server")
    check_metrics_tls(str(server), str(server / "tls.crt"))
    check_metrics_tls("", "")
    (server / "tls.key").write_text("no key")
    with pytest.raises(ConfigError) as caught:
        check_metrics_tls(str(server), str(tmp_path / "none.pem"))
    assert [problem.path for problem in caught.value.problems] == [
        "--metrics-cert-dir",
        "--metrics-client-ca-file",
    ]
    assert "none.pem cannot be used: No such file or directory" in str(caught.value)
    with pytest.raises(ConfigError, match="tls.crt with .*tls.key cannot be used: No such file"):
        check_metrics_tls(str(tmp_path), "")
