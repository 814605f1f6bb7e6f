"""`/metrics` over HTTP, plain or with TLS, on a thread of its own."""

import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, start_http_server

from epp.errors import ConfigError, Problem

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why a request is not answered. `status`: code and phrase; `message`: for the reader, one line."""

    status: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()


Authorize = Callable[[str | None], Refusal | None]
"""From a request's bearer token, None where it has none, to why it is refused; None = it is not."""


def check_metrics_tls(cert_dir: str, client_ca_file: str) -> None:
    """Raises ConfigError: a file of the two flags' is missing or cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    problems: list[Problem] = []
    if cert_dir:
        chain, key = _pair(cert_dir)
        try:
            context.load_cert_chain(chain, key)
        except OSError as error:
            what = error.strerror or error
            problems.append(Problem("--metrics-cert-dir", f"{chain} with {key} cannot be used: {what}"))
    if client_ca_file:
        try:
            context.load_verify_locations(client_ca_file)
        except OSError as error:
            what = error.strerror or error
            problems.append(Problem("--metrics-client-ca-file", f"{client_ca_file} cannot be used: {what}"))
    if problems:
        raise ConfigError("command line", *problems)


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    cert_dir: str = "",
    client_ca_file: str = "",
    pages: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    authorize: Authorize | None = None,
) -> Callable[[], None]:
    """Serve `registry`; returns what ends it.

    Where `client_ca_file` is given, only to who shows a certificate that one of its authorities signed.
    `pages`: JSON documents by path; made on threads of the server.
    `authorize`: asked for each request, whatever its path, on threads of the server; None = all may read.

    Raises:
        OSError: the port cannot be had, or a file cannot be read.
    """
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    tls: dict[str, Any] = {}
    if cert_dir:
        chain, key = _pair(cert_dir)
        tls = {"certfile": str(chain), "keyfile": str(key), "tls_min_version": ssl.TLSVersion.TLSv1_2}
    if client_ca_file:
        tls |= {"client_cafile": client_ca_file, "client_auth_required": True}
    server, thread = start_http_server(port, host or everywhere, registry, **tls)
    server.handle_error = _broke_off  # type: ignore[method-assign]
    app = server.get_app()
    if app is not None:
        app = _with_pages(app, pages) if pages else app
        server.set_app(app if authorize is None else _guarded(app, authorize))
    if tls:
        # Else the handshake is made where connections are accepted, and one silent client stops all others.
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


def _with_pages(metrics: WSGIApplication, pages: Mapping[str, Callable[[], bytes]]) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        make = pages.get(environ["PATH_INFO"])
        if make is None:
            return metrics(environ, start_response)
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return []
        try:
            page = make()
        except Exception:
            log.exception("a page beside the metrics cannot be made", extra={"path": environ["PATH_INFO"]})
            start_response("500 Internal Server Error", [])
            return []
        start_response("200 OK", [("Content-Type", "application/json")])
        return [page]

    return app


def _guarded(served: WSGIApplication, authorize: Authorize) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        refusal: Refusal | None
        try:
            refusal = authorize(bearer_token(environ.get("HTTP_AUTHORIZATION", "")))
        except Exception:
            log.exception("who may read the metrics cannot be found out")
            refusal = Refusal("500 Internal Server Error", "Authorization failed")
        if refusal is None:
            return served(environ, start_response)
        plain = ("Content-Type", "text/plain; charset=utf-8")
        start_response(refusal.status, [plain, ("X-Content-Type-Options", "nosniff"), *refusal.headers])
        return [f"{refusal.message}\n".encode()]

    return app


def bearer_token(authorization: str) -> str | None:
    """The token of an Authorization header; None where it holds none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _broke_off(request: Any, client_address: Any) -> None:
    """Of a connection whose peer was refused by TLS, or has gone: no trace on stderr."""
    log.debug("a connection for metrics broke off", exc_info=True)


def _pair(cert_dir: str) -> tuple[Path, Path]:
    return Path(cert_dir, "tls.crt"), Path(cert_dir, "tls.key")
