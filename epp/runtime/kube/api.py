"""Calls to a Kubernetes API server: raw JSON in, raw JSON out, and watches as lines."""

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import MappingProxyType
from typing import Final, Self

import aiohttp
import msgspec

from epp.errors import ConfigError, WarmrouteError
from epp.runtime.kube.access import SERVICE_ACCOUNT, Access, in_cluster, of_kubeconfig
from epp.runtime.lent_sockets import lent_socket

CONNECT_TIMEOUT_S: Final = 10.0
# A server gives up on a list after 60 s by itself.
CALL_TIMEOUT_S: Final = 70.0
# Bookmarks come about once a minute where nothing else does.
SILENCE_S: Final = 150.0
# Clients that began together are not to come back together.
WATCH_SECONDS: Final = (300, 600)
# Of our own: no connection was to be had.
UNREACHED: Final = "Unreached"
# A cause, not a reason: the server is behind the version that was asked for.
TOO_LARGE_VERSION: Final = "ResourceVersionTooLarge"
_MOST_ERROR_BYTES: Final = 64 << 10
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class KubeError(WarmrouteError):
    """A call to the API server did not do what it should.

    Attributes:
        verb: method of the call; WATCH for a watch.
        path: what was asked for, without the query.
        status: of the answer, or of the error that a watch was told; 0 = no answer came, or it broke off.
        reason: `Status.reason` of the API, such as `Forbidden`, `Expired`; "" = unknown; `UNREACHED`.
        retry_after_s: how long the server wants to be left alone; None = it did not say.
    """

    def __init__(
        self,
        verb: str,
        path: str,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{verb} {path}: {status} {message}" if status else f"{verb} {path}: {message}")
        self.verb = verb
        self.path = path
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class Cause(msgspec.Struct, frozen=True):
    """One of `Status.details.causes`."""

    reason: str = ""


class StatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    """`Status.details`."""

    retry_after_seconds: float = 0.0
    causes: tuple[Cause, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """What the API server says about a failure: as the body of an answer, or as a watch's ERROR."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None

    def error(
        self, verb: str, path: str, *, status: int = 0, retry_after_s: float | None = None
    ) -> KubeError:
        """The same as an exception; `status` and `retry_after_s` of an answer's head come first."""
        details = self.details or StatusDetails()
        causes = [cause.reason for cause in details.causes if cause.reason]
        return KubeError(
            verb,
            path,
            self.message or self.reason or "the server gave no reason",
            status=status or self.code,
            # The cause is what tells a version from the future from a server that is only slow.
            reason=TOO_LARGE_VERSION if TOO_LARGE_VERSION in causes else self.reason,
            retry_after_s=details.retry_after_seconds or None if retry_after_s is None else retry_after_s,
        )


class KubeApi:
    """One API server, asked over HTTP/1.1 connections that are kept.

    Tokens and certificates follow their files; a call refused for want of a valid token is repeated once with
    one read anew.
    """

    def __init__(
        self, access: Access, *, timeout_s: float = CALL_TIMEOUT_S, silence_s: float = SILENCE_S
    ) -> None:
        """Within a running event loop. `silence_s` is how long a watch may say nothing."""
        self._access = access
        self._calls = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._watches = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, socket_factory=lent_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": "application/json",
                # Within a cluster the bytes are cheaper than the work of packing them.
                "Accept-Encoding": "identity",
                "User-Agent": "warmroute",
            },
        )

    @classmethod
    async def connect(
        cls, kubeconfig: str, environment: Mapping[str, str], *, service_account: str = SERVICE_ACCOUNT
    ) -> Self:
        """With the kubeconfig in file `kubeconfig`, or "" = as the pod's service account.

        Nothing is asked of the server yet. `service_account` is the folder with its token and ca.crt.

        Raises:
            ConfigError: a file is missing or wrong; the pod's environment or folder is not there.
        """
        if kubeconfig:
            return cls(await of_kubeconfig(kubeconfig, environment))
        return cls(await in_cluster(environment, service_account))

    async def get(self, path: str, query: Mapping[str, str] = _NOTHING) -> bytes:
        """Body of the answer. Raises KubeError."""
        return await self.send("GET", path, None, query=query)

    async def send(
        self,
        method: str,
        path: str,
        body: object,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] = _NOTHING,
    ) -> bytes:
        """Body of the answer; `body` is anything that `msgspec.json.encode` takes, None = none.

        Raises:
            KubeError: not reached, no answer in time, or a status other than 2xx.
        """
        data = None if body is None else msgspec.json.encode(body)
        async with self._answer(method, method, path, query, self._calls, data, content_type) as answer:
            return await answer.read()

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[list[bytes], None]:
        """What the server tells, one JSON text a line; lines that came together come in one list.

        The first list is empty and says that the server has agreed to the watch. Ends when the server ends
        it, which it does after five to ten minutes unless `query` has a `timeoutSeconds`.

        Raises:
            KubeError: refused, broken off, or nothing heard for `silence_s`.
        """
        asked = {"timeoutSeconds": str(random.randint(*WATCH_SECONDS)), **query, "watch": "1"}
        async with self._answer("WATCH", "GET", path, asked, self._watches) as answer:
            _probe_when_idle(answer)
            yield []
            async for together in lines(answer.content.iter_any()):
                yield together

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
        data: bytes | None = None,
        content_type: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer, whose body is read inside; what goes wrong there is a KubeError too."""
        try:
            answer = await self._ask(method, path, query, timeout, data, content_type)
            async with answer:
                if not 200 <= answer.status < 300:
                    raise await _refusal(verb, path, answer)
                yield answer
        except ConfigError as error:
            raise KubeError(verb, path, f"no credentials: {error}", status=401) from None
        except aiohttp.SocketTimeoutError:
            raise KubeError(verb, path, f"nothing heard for {timeout.sock_read:g} s") from None
        except TimeoutError as error:
            raise KubeError(verb, path, _late(error, timeout)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KubeError(verb, path, _words(error), reason=_why_not_reached(error)) from None

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
        data: bytes | None,
        content_type: str,
    ) -> aiohttp.ClientResponse:
        access = self._access
        refused: str | None = None
        while True:
            authorization = await access.authorization(refused)
            headers = {"Authorization": authorization} if authorization else {}
            if data is not None:
                headers["Content-Type"] = content_type
            answer = await self._session.request(
                method,
                access.host + path,
                params=query,
                data=data,
                headers=headers,
                timeout=timeout,
                ssl=access.tls(),
                server_hostname=access.server_hostname,
                proxy=access.proxy,
                # The token is for this server alone.
                allow_redirects=False,
            )
            if answer.status != 401 or refused is not None:
                return answer
            answer.release()
            refused = authorization


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The complete lines of each chunk, without empty ones. What follows the last line end is dropped."""
    begun: list[bytes] = []
    async for chunk in chunks:
        complete = chunk.split(b"\n")
        if len(complete) == 1:
            begun.append(chunk)
            continue
        complete[0] = b"".join((*begun, complete[0]))
        begun = [complete.pop()]
        together = [line for line in complete if line.strip()]
        if together:
            yield together


async def _refusal(verb: str, path: str, answer: aiohttp.ClientResponse) -> KubeError:
    try:
        body = await answer.content.readexactly(_MOST_ERROR_BYTES)
    except asyncio.IncompleteReadError as whole:
        body = whole.partial
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        status = Status(message=body.decode(errors="replace").strip()[:200])
    if not status.message:
        status = Status(message=answer.reason or "", reason=status.reason, details=status.details)
    return status.error(
        verb, path, status=answer.status, retry_after_s=_seconds(answer.headers.get("Retry-After"))
    )


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else None


def _why_not_reached(error: Exception) -> str:
    """A certificate that is not believed is an answer of a kind."""
    nobody = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)
    return UNREACHED if nobody else ""


def _late(error: TimeoutError, timeout: aiohttp.ClientTimeout) -> str:
    return str(error) or f"no answer within {timeout.total or CONNECT_TIMEOUT_S:g} s"


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {_plainly(error.os_error)}"
    if isinstance(error, aiohttp.ClientResponseError):
        # Its own words hold the URL that was asked: that of a proxy may have a password.
        who = "the proxy answered " if isinstance(error, aiohttp.ClientHttpProxyError) else ""
        return f"{who}{error.status} {error.message}"
    return str(error) or type(error).__name__


def _plainly(error: OSError) -> str:
    """Loops put words of their own, and the address once more, in place of what the system says."""
    if not error.errno or isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _probe_when_idle(answer: aiohttp.ClientResponse) -> None:
    """Lets the kernel find out within a minute that the other end is gone without a word."""
    transport = answer.connection.transport if answer.connection else None
    sock = transport.get_extra_info("socket") if transport else None
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
