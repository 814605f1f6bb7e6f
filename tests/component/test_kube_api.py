"""Calls to an API server on loopback: credentials that change, certificates, errors, watches."""

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from epp.errors import ConfigError
from epp.runtime.kube import api as api_module
from epp.runtime.kube.access import Access, in_cluster, of_kubeconfig, proxy_of
from epp.runtime.kube.api import UNREACHED, KubeApi, KubeError, lines
from tests.data.runtime.open_files import too_many_open_files
from tests.data.tls.authority import Authority

BOTH = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers `answer` and notes what was asked; `tokens` are those it takes, empty = all."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[web.Request] = []
        self.shown: list[str | None] = []
        self.connections: set[Any] = set()
        self.tokens: set[str] = set()
        self.closing = asyncio.Event()
        self.answer: Handler = self._hello

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.connections.add(request.transport)
        shown = request.headers.get("Authorization")
        self.shown.append(shown)
        if self.tokens and shown not in {f"Bearer {token}" for token in self.tokens}:
            return status(401, "Unauthorized", "Unauthorized")
        return await self.answer(request)

    async def _hello(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"kind": "Hello"}')


def status(code: int, reason: str, message: str, **more: Any) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message} | more
    return web.json_response(body, status=code)


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    server = Server()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, 0, ssl_context=tls).start()
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.closing.set()
        await runner.cleanup()


@asynccontextmanager
async def connected(
    kubeconfig: str | Path, environment: dict[str, str] | None = None, **more: Any
) -> AsyncIterator[KubeApi]:
    api = await KubeApi.connect(str(kubeconfig), environment or {}, **more)
    try:
        yield api
    finally:
        await api.close()


def config_of(
    folder: Path, server: str, user: dict[str, Any] | None = None, **cluster: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "there", "context": {"cluster": "other", "user": "me"}},
            {"name": "here", "context": {"cluster": "mine", "user": "me", "namespace": "models"}},
        ],
        "clusters": [{"name": "mine", "cluster": {"server": server} | cluster}],
        "users": [{"name": "me", "user": {"token": "first"} if user is None else user}],
    }


def written(folder: Path, config: Any) -> Path:
    path = folder / "kubeconfig"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., Path]:
    def make(server: str, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
        return written(tmp_path, config_of(tmp_path, server, user, **cluster))

    return make


class Pod:
    """What a pod finds of its service account: a folder whose files are swapped as the kubelet does it."""

    def __init__(self, folder: Path, ca: str) -> None:
        self.folder = folder
        self._rounds = 0
        folder.mkdir()
        for name in ("token", "ca.crt", "namespace"):
            (folder / name).symlink_to(Path("..data") / name)
        self.put("first", ca)

    def put(self, token: str, ca: str) -> None:
        self._rounds += 1
        data = self.folder / f"..{self._rounds}"
        data.mkdir()
        (data / "token").write_text(token)
        (data / "ca.crt").write_bytes(Path(ca).read_bytes())
        (data / "namespace").write_text("models\n")
        link = self.folder / "..new"
        link.symlink_to(data.name)
        os.replace(link, self.folder / "..data")

    def environment(self, server: Server) -> dict[str, str]:
        host, _, port = server.url.removeprefix("https://").rpartition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


async def refused(call: Awaitable[object]) -> KubeError:
    with pytest.raises(KubeError) as caught:
        await call
    return caught.value


@BOTH
async def test_a_pod_follows_its_token_and_its_authority(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    pod = Pod(tmp_path / "account", old.ca)
    async with serving(old.server()) as server:
        environment = pod.environment(server)
        async with connected("", environment, service_account=str(pod.folder)) as api:
            assert not server.asked
            assert await api.get("/api/v1/pods", {"limit": "2", "labelSelector": "a in (b,c),d=e+f/g"}) == (
                b'{"kind": "Hello"}'
            )
            pod.put("second\n", old.ca)
            await api.get("/api")
            assert server.shown == ["Bearer first", "Bearer second"]
            assert server.asked[0].query == {"limit": "2", "labelSelector": "a in (b,c),d=e+f/g"}
            assert len(server.connections) == 1

            async with serving(new.server()) as other:
                api._access.host = other.url
                unbelieved = await refused(api.get("/api"))
                assert "certificate" in str(unbelieved)
                assert not unbelieved.reason
                pod.put("third", new.ca)
                await api.get("/api")
                assert other.shown == ["Bearer third"]


async def test_a_refused_call_is_repeated_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    pod = Pod(tmp_path / "account", authority.ca)
    async with (
        serving(authority.server()) as server,
        connected("", pod.environment(server), service_account=str(pod.folder)) as api,
    ):
        server.tokens = {"never"}
        for call in (api.get("/api"), api.send("POST", "/api", {}), anext(api.watch("/api", {}))):
            server.asked.clear()
            error = await refused(call)
            assert (error.status, error.reason) == (401, "Unauthorized")
            assert str(error).endswith(" /api: 401 Unauthorized")
            assert len(server.asked) == 2


async def test_a_401_finds_a_token_whose_file_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    pod = Pod(tmp_path / "account", authority.ca)
    async with (
        serving(authority.server()) as server,
        connected("", pod.environment(server), service_account=str(pod.folder)) as api,
    ):
        same = api._access._token_seen
        monkeypatch.setattr("epp.runtime.kube.access.signature", lambda path: same)
        pod.put("other", authority.ca)
        await api.get("/api")
        server.tokens = {"other"}
        await api.get("/api")
        assert server.shown == ["Bearer first", "Bearer first", "Bearer other"]


async def test_a_token_that_is_gone_for_a_moment_is_kept(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    pod = Pod(tmp_path / "account", authority.ca)
    async with (
        serving(authority.server()) as server,
        connected("", pod.environment(server), service_account=str(pod.folder)) as api,
    ):
        for spoilt in ("", "two\nlines", "ünprintable"):
            pod.put(spoilt, authority.ca)
            await api.get("/api")
        (pod.folder / "token").unlink()
        await api.get("/api")
        assert set(server.shown) == {"Bearer first"}


async def test_an_authority_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    """For a moment; nothing of its file changes when that is over."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    pod = Pod(tmp_path / "account", old.ca)
    environment = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    access = await in_cluster(environment, str(pod.folder))
    before = access.tls()
    pod.put("second", new.ca)
    with too_many_open_files(pod.folder, "epp.runtime.kube.access.RESTClientObject") as tried:
        assert access.tls() is access.tls() is before
    assert tried
    after = access.tls()
    assert [str(names["subject"]) for names in after.get_ca_certs()] == [
        str(((("commonName", "authority new"),),))
    ]
    assert access.tls() is after


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
async def test_a_pod_without_its_files(tmp_path: Path, missing: str) -> None:
    authority = Authority(tmp_path / "authority")
    pod = Pod(tmp_path / "account", authority.ca)
    (pod.folder / missing).unlink()
    environment = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match=f"in-cluster: .*{missing}: no such file"):
        await KubeApi.connect("", environment, service_account=str(pod.folder))


async def test_no_pod() -> None:
    with pytest.raises(ConfigError, match="in-cluster: KUBERNETES_SERVICE_HOST.* give --kubeconfig FILE"):
        await KubeApi.connect("", {})


async def test_ipv6_addresses_are_bracketed(tmp_path: Path) -> None:
    pod = Pod(tmp_path / "account", Authority(tmp_path / "authority").ca)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    async with connected("", environment, service_account=str(pod.folder)) as api:
        assert api._access.host == "https://[fd00::1]:443"


def inline(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


@pytest.mark.parametrize("embedded", [True, False])
async def test_client_certificates_of_a_kubeconfig(
    tmp_path: Path, plain: Callable[..., Path], embedded: bool
) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("client")
    async with serving(authority.server(clients=True)) as server:
        if embedded:
            user = {"client-certificate-data": inline(certificate), "client-key-data": inline(key)}
            path = plain(server.url, user, **{"certificate-authority-data": inline(authority.ca)})
        else:
            user = {"client-certificate": "authority/client.crt", "client-key": "authority/client.key"}
            path = plain(server.url, user, **{"certificate-authority": "authority/ca.crt"})
        async with connected(path) as api:
            await api.get("/api")
            assert server.shown == [None]


async def test_a_server_that_has_another_name(tmp_path: Path, plain: Callable[..., Path]) -> None:
    authority = Authority(tmp_path / "authority")
    async with serving(authority.server("kubernetes.default.svc")) as server:
        named = {"certificate-authority": authority.ca, "tls-server-name": "kubernetes.default.svc"}
        async with connected(plain(server.url, **named)) as api:
            await api.get("/api")
        async with connected(plain(server.url, **{"certificate-authority": authority.ca})) as api:
            assert (await refused(api.get("/api"))).status == 0
        async with connected(plain(server.url, **{"insecure-skip-tls-verify": True})) as api:
            await api.get("/api")
        assert len(server.asked) == 2


async def test_a_token_file_beside_the_kubeconfig_counts_more_than_a_token(
    tmp_path: Path, plain: Callable[..., Path]
) -> None:
    (tmp_path / "token.txt").write_text("one\n")
    async with serving() as server:
        user = {"token": "zero", "tokenFile": "token.txt"}
        async with connected(plain(f"{server.url}/k8s/clusters/c-1/", user)) as api:
            await api.get("/api")
            assert server.asked[0].path == "/k8s/clusters/c-1/api"
            (tmp_path / "token.txt").write_text("second")
            await api.get("/api")
        assert server.shown == ["Bearer one", "Bearer second"]


async def test_a_kubeconfig_is_read_again_after_a_401(tmp_path: Path, plain: Callable[..., Path]) -> None:
    async with serving() as server, connected(plain(server.url)) as api:
        server.tokens = {"second"}
        plain(server.url, {"token": "second"})
        await asyncio.gather(*(api.get("/api") for _ in range(3)))
        # The second reading fails: what is wrong is said, and nothing was asked in vain.
        server.tokens = {"third"}
        written(tmp_path, "[")
        error = await refused(api.get("/api"))
        assert error.status == 401
        assert "no credentials: --kubeconfig" in str(error)


async def test_basic_credentials(plain: Callable[..., Path]) -> None:
    async with serving() as server:
        async with connected(plain(server.url, {"username": "me", "password": "secret"})) as api:
            await api.get("/api")
        assert server.shown == ["Basic " + base64.b64encode(b"me:secret").decode()]


async def test_a_server_without_tls_needs_no_user(tmp_path: Path) -> None:
    async with serving() as server:
        config = config_of(tmp_path, server.url)
        del config["contexts"][1]["context"]["user"], config["users"]
        async with connected(written(tmp_path, config)) as api:
            await api.get("/api")
        assert server.shown == [None]


def plugin(tmp_path: Path, *, ends_in_s: float | None = None, says: str | None = None) -> dict[str, Any]:
    """A user whose plugin counts its runs in the token."""
    script = tmp_path / "plugin.py"
    ends = ""
    if ends_in_s is not None:
        ends = f'"expirationTimestamp": "{(datetime.now(UTC) + timedelta(seconds=ends_in_s)):%FT%TZ}",'
    said = says or (
        'json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
        f'"status": {{{ends} "token": f"run-{{runs}}"}}}})'
    )
    script.write_text(
        "import json, pathlib, sys\n"
        "path = pathlib.Path(__file__).with_name('runs')\n"
        "runs = int(path.read_text()) + 1 if path.exists() else 1\n"
        f"path.write_text(str(runs))\nprint({said})\n"
    )
    command = {"command": sys.executable, "args": ["-S", str(script)]}
    return {"exec": command | {"apiVersion": "client.authentication.k8s.io/v1"}}


@BOTH
async def test_a_plugin_is_run_again_once_for_all_that_were_refused(
    tmp_path: Path, plain: Callable[..., Path]
) -> None:
    async with serving() as server:
        async with connected(plain(server.url, plugin(tmp_path))) as api:
            await api.get("/api")
            await api.get("/api")
            server.tokens = {"run-2"}
            await asyncio.gather(*(api.get("/api") for _ in range(4)))
        assert set(server.shown) == {"Bearer run-1", "Bearer run-2"}
        assert (tmp_path / "runs").read_text() == "2"


async def test_a_plugins_token_is_replaced_before_it_ends(tmp_path: Path, plain: Callable[..., Path]) -> None:
    async with serving() as server:
        async with connected(plain(server.url, plugin(tmp_path, ends_in_s=20))) as api:
            plugin(tmp_path, ends_in_s=3600)
            await api.get("/api")
            await api.get("/api")
        assert server.shown == ["Bearer run-2", "Bearer run-2"]


async def test_a_plugin_that_fails(tmp_path: Path, plain: Callable[..., Path]) -> None:
    path = plain("https://127.0.0.1:1", plugin(tmp_path, says="sys.exit('no login')"))
    with pytest.raises(ConfigError, match=r"--kubeconfig .*exec: .*gave no credentials"):
        await KubeApi.connect(str(path), {})


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: "a: [", "neither YAML nor JSON"),
        (lambda config: "just words", "no kubeconfig: Expected `object`, got `str`"),
        (
            lambda config: without(config, "current-context"),
            r"current-context: '' is not one of.*there, here",
        ),
        (lambda config: config | {"current-context": "x"}, r"current-context: 'x' is not one of"),
        (lambda config: without(config, "clusters"), "clusters: there is no 'mine'"),
        (lambda config: config | {"users": []}, "users: there is no 'me'"),
        (lambda config: config | {"users": 3}, r"no kubeconfig: .*\$\.users"),
        (
            lambda config: config | {"users": [{"name": "me", "user": {"as": "root"}}]},
            "as: acting as another user is not supported",
        ),
        (
            lambda config: config | {"users": [{"name": "me", "user": {"client-certificate": "gone.crt"}}]},
            "gone.crt",
        ),
        (
            lambda config: config | {"users": [{"name": "me", "user": {"tokenFile": "gone"}}]},
            "gone: cannot be read: No such file or directory|gone",
        ),
        (
            lambda config: config | {"clusters": [{"name": "mine", "cluster": {"server": "example.com"}}]},
            "server 'example.com' is not a https://",
        ),
        (
            lambda config: (
                config
                | {
                    "clusters": [
                        {
                            "name": "mine",
                            "cluster": {"server": "https://a", "proxy-url": "socks5://me:word@b"},
                        }
                    ]
                }
            ),
            "proxy-url 'socks5://b': only http",
        ),
        (
            lambda config: (
                config
                | {
                    "clusters": [
                        {
                            "name": "mine",
                            "cluster": {"server": "https://a", "certificate-authority-data": "AAAA"},
                        }
                    ]
                }
            ),
            "cannot be used for TLS",
        ),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    path = written(tmp_path, change(config_of(tmp_path, "https://127.0.0.1:1")))
    with pytest.raises(ConfigError, match=says) as caught:
        await KubeApi.connect(str(path), {})
    assert str(caught.value).startswith(f"--kubeconfig {path}: ")
    assert "\n" not in str(caught.value)


async def test_a_kubeconfig_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kubeconfig .*/none: cannot be read: No such file or directory"):
        await KubeApi.connect(str(tmp_path / "none"), {})


@asynccontextmanager
async def asking(plain: Callable[..., Path], **limits: float) -> AsyncIterator[tuple[KubeApi, Server]]:
    async with serving() as server:
        api = KubeApi(await of_kubeconfig(str(plain(server.url)), {}), **limits)
        try:
            yield api, server
        finally:
            await api.close()


def answering(response: Callable[[], web.StreamResponse]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return response()

    return answer


@pytest.mark.parametrize(
    ("response", "says", "reason", "retry_after_s"),
    [
        (
            lambda: status(403, "Forbidden", 'pods is forbidden: User "x" cannot list'),
            'GET /pods: 403 pods is forbidden: User "x" cannot list',
            "Forbidden",
            None,
        ),
        (
            lambda: status(429, "TooManyRequests", "re-initializing", details={"retryAfterSeconds": 3}),
            "GET /pods: 429 re-initializing",
            "TooManyRequests",
            3.0,
        ),
        (
            lambda: web.Response(status=429, text="Too many requests.\n", headers={"Retry-After": "1"}),
            "GET /pods: 429 Too many requests.",
            "",
            1.0,
        ),
        (
            lambda: web.Response(status=503, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
            "GET /pods: 503 Service Unavailable",
            "",
            None,
        ),
        (
            lambda: status(
                504,
                "Timeout",
                "Too large resource version: 9",
                details={"causes": [{"reason": "ResourceVersionTooLarge"}], "retryAfterSeconds": 1},
            ),
            "GET /pods: 504 Too large resource version: 9",
            "ResourceVersionTooLarge",
            1.0,
        ),
        (lambda: web.Response(status=307, headers={"Location": "/x"}), "GET /pods: 307 Temporary", "", None),
        (lambda: web.Response(status=500, body=b"\xff" * 99_999), "GET /pods: 500 \ufffd", "", None),
    ],
)
async def test_what_an_error_says(
    plain: Callable[..., Path],
    response: Callable[[], web.Response],
    says: str,
    reason: str,
    retry_after_s: float | None,
) -> None:
    async with asking(plain) as (api, server):
        server.answer = answering(response)
        error = await refused(api.get("/pods", {"limit": "500"}))
        assert str(error).startswith(says)
        assert len(str(error)) < 300
        assert (error.reason, error.retry_after_s) == (reason, retry_after_s)
        assert f" {error.status} " in says
        assert len(server.asked) == 1


@BOTH
async def test_not_reached_too_late_and_broken_off(plain: Callable[..., Path]) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await server.closing.wait()
        return web.Response()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async with asking(plain, timeout_s=0.5) as (api, server):
        server.answer = never
        late = await refused(api.send("PUT", "/leases/x", {}))
    async with asking(plain) as (api, server):
        server.answer = half
        broken = await refused(api.get("/pods"))
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            api._access.host = f"http://127.0.0.1:{unused.getsockname()[1]}"
            away = await refused(api.get("/pods"))
    assert str(late) == "PUT /leases/x: no answer within 0.5 s"
    assert str(broken).startswith("GET /pods: ")
    assert re.fullmatch(r"GET /pods: cannot connect to 127\.0\.0\.1:\d+: Connection refused", str(away))
    assert {late.status, broken.status, away.status} == {0}
    assert [late.reason, broken.reason, away.reason] == ["", "", UNREACHED]


async def test_what_is_sent(plain: Callable[..., Path]) -> None:
    bodies: list[tuple[str, str | None, bytes]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        bodies.append((request.method, request.headers.get("Content-Type"), await request.read()))
        return web.Response(status=201, body=b"made")

    async with asking(plain) as (api, server):
        server.answer = note
        assert await api.send("POST", "/a", {"x": (1, None)}) == b"made"
        apply = "application/apply-patch+yaml"
        query = {"fieldManager": "warmroute", "force": "true"}
        await api.send("PATCH", "/a/b/status", {"k": "é"}, content_type=apply, query=query)
        await api.send("DELETE", "/a/b", None)
        assert server.asked[1].query == query
        assert server.asked[0].headers["Accept"] == "application/json"
    assert bodies[:2] == [
        ("POST", "application/json", b'{"x":[1,null]}'),
        ("PATCH", apply, '{"k":"é"}'.encode()),
    ]
    assert (bodies[2][0], bodies[2][2]) == ("DELETE", b"")


def streaming(*pieces: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Handler:
    """Writes the pieces one by one, then ends well unless `then` does something else."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)
        if then is not None:
            await then(request)
        return response

    return answer


async def cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


@BOTH
async def test_a_watch_gives_whole_lines_however_large(plain: Callable[..., Path]) -> None:
    large = json.dumps({"type": "ADDED", "object": {"x": "y" * (2 << 20)}}).encode()
    sent = b"\n".join([b'{"a":1}', b"", large, b'{"b":2}', b'{"c":3}', b""]) + b'{"half":'
    pieces = [sent[start : start + 70_001] for start in range(0, len(sent), 70_001)]
    async with asking(plain) as (api, server):
        server.answer = streaming(*pieces)
        heard = [batch async for batch in api.watch("/pods", {"resourceVersion": "7"})]
        assert heard[0] == []
        assert [line for batch in heard for line in batch] == [b'{"a":1}', large, b'{"b":2}', b'{"c":3}']
        asked = server.asked[0].query
        assert (asked["watch"], asked["resourceVersion"]) == ("1", "7")
        assert 300 <= int(asked["timeoutSeconds"]) <= 600
        async for _ in api.watch("/pods", {"timeoutSeconds": "5"}):
            pass
        assert server.asked[1].query["timeoutSeconds"] == "5"


@BOTH
@pytest.mark.parametrize(
    ("silent", "says"), [(False, "WATCH /pods: "), (True, "WATCH /pods: nothing heard for 1.5 s")]
)
async def test_a_watch_that_breaks_off(plain: Callable[..., Path], silent: bool, says: str) -> None:
    # What comes before the silence has to come in time, too, however long the machine stands still.
    async with asking(plain, **({"silence_s": 1.5} if silent else {})) as (api, server):

        async def hang(request: web.Request) -> None:
            await server.closing.wait()

        server.answer = streaming(b'{"a":1}\n', then=hang if silent else cut)
        heard: list[list[bytes]] = []

        async def hear() -> None:
            async for batch in api.watch("/pods", {}):
                heard.append(batch)  # noqa: PERF401 - what came before the error counts

        error = await refused(hear())
        assert str(error).startswith(says)
        assert error.status == 0
        assert heard == [[], [b'{"a":1}']]


async def test_a_watch_that_is_refused(plain: Callable[..., Path]) -> None:
    async with asking(plain) as (api, server):
        server.answer = answering(lambda: status(410, "Expired", "too old resource version: 1 (9)"))
        error = await refused(anext(api.watch("/pods", {})))
        assert str(error) == "WATCH /pods: 410 too old resource version: 1 (9)"


@BOTH
async def test_dead_peers_are_probed_and_who_leaves_a_watch_ends_its_connection(
    plain: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[aiohttp.ClientResponse] = []
    probe = api_module._probe_when_idle

    def noting(answer: aiohttp.ClientResponse) -> None:
        answers.append(answer)
        probe(answer)

    monkeypatch.setattr(api_module, "_probe_when_idle", noting)
    async with asking(plain) as (api, server):

        async def hang(request: web.Request) -> None:
            await server.closing.wait()

        server.answer = streaming(b'{"a":1}\n', then=hang)
        async with aclosing(api.watch("/pods", {})) as batches:
            assert [await anext(batches), await anext(batches)] == [[], [b'{"a":1}']]
            connection = answers[0].connection
            assert connection is not None
            assert connection.transport is not None
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            transport = connection.transport
        assert transport.is_closing()


async def test_lines_are_the_same_wherever_the_chunks_are_cut() -> None:
    text = b'{"a": 1}\n\n{"b": 2}\r\n \n{"c": 3}\n{"cut": '

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(text), size):
            yield text[start : start + size]

    for size in range(1, len(text) + 1):
        found = [line.strip() async for batch in lines(chunks(size)) for line in batch]
        assert found == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://10.96.0.1:443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://10.96.0.1:443", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://10.96.0.1:443", {"HTTP_PROXY": "http://proxy:3128"}, None),
        ("http://10.96.0.1:80", {"HTTP_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://10.96.0.1", {"HTTPS_PROXY": "http://p", "NO_PROXY": "x, 10.0.0.0/8"}, None),
        ("https://10.96.0.1", {"HTTPS_PROXY": "http://p", "NO_PROXY": "11.0.0.0/8"}, "http://p"),
        ("https://10.96.0.1", {"HTTPS_PROXY": "http://p", "no_proxy": "10.96.0.1"}, None),
        ("https://[fd00::1]:443", {"HTTPS_PROXY": "http://p", "NO_PROXY": "fd00::/8"}, None),
        ("https://api.corp.example", {"HTTPS_PROXY": "http://p", "NO_PROXY": ".corp.example"}, None),
        ("https://api.corp.example", {"HTTPS_PROXY": "http://p", "NO_PROXY": "corp.example"}, None),
        ("https://api.corp.example", {"HTTPS_PROXY": "http://p", "NO_PROXY": "orp.example,,"}, "http://p"),
        ("https://api.corp.example", {"HTTPS_PROXY": "http://p", "NO_PROXY": "*"}, None),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://p"}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://p"}, None),
        ("https://10.96.0.1", {}, None),
    ],
)
def test_which_proxy(url: str, environment: dict[str, str], proxy: str | None) -> None:
    assert proxy_of(url, environment) == proxy


async def test_a_proxy_is_asked(plain: Callable[..., Path]) -> None:
    async with serving() as proxy:
        path = plain("http://api.invalid:80")
        async with connected(path, {"HTTP_PROXY": proxy.url}) as api:
            await api.get("/api")
        assert proxy.asked[0].host == "api.invalid"
        path = plain("http://api.invalid:80", **{"proxy-url": proxy.url})
        async with connected(path) as api:
            await api.get("/api")
        assert len(proxy.asked) == 2


async def test_the_environment_of_the_process_counts_for_nothing(
    plain: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    access: Access = await of_kubeconfig(str(plain("http://api.invalid:80")), {})
    assert access.proxy is None
