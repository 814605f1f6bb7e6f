"""Where the API server is, whom to believe there, and what to show to be let in."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import load_kube_config

from epp.errors import ConfigError, Problem, Unread
from epp.runtime.watch import Signature, signature

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# How long before its end a token from a plugin is replaced.
_BEFORE_EXPIRY_S: Final = 30.0
_PLUGIN_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """One reading of a kubeconfig or of a service account's folder.

    Attributes:
        source: what errors name.
        configuration: the library's record: host, certificates, proxy.
        authorization: value of the header; "" = none.
        token_path: file that holds the token; "" = none does.
        expires_at: Unix time at which `authorization` ends; None = unknown.
    """

    source: str
    configuration: Configuration
    authorization: str = ""
    token_path: str = ""
    expires_at: float | None = None


class Access:
    """Credentials that follow their files, and are loaded anew when they end or are refused.

    Attributes:
        host: URL of the server, without a slash at its end.
        proxy: URL of a proxy; None = asked directly.
        server_hostname: name expected in the server's certificate; None = that of the URL.
    """

    def __init__(
        self, loaded: Loaded, load: Callable[[], Awaitable[Loaded]], environment: Mapping[str, str]
    ) -> None:
        """Raises ConfigError when a certificate or the token cannot be used."""
        configuration = loaded.configuration
        self.host: str = configuration.host
        self.proxy: str | None = configuration.proxy or proxy_of(self.host, environment)
        self.server_hostname: str | None = configuration.tls_server_name
        self._load = load
        self._loading = asyncio.Lock()
        self._take(loaded)

    async def authorization(self, refused: str | None = None) -> str:
        """Value of the header for the next call; "" = none. `refused` is one that the server did not take.

        Raises:
            ConfigError: credentials had to be loaded anew, and could not.
        """
        if self._loaded.token_path:
            self._follow_token(anew=refused is not None)
        elif refused == self._authorization or self._ends_soon():
            await self._load_anew(self._authorization)
        return self._authorization

    def tls(self) -> ssl.SSLContext:
        """For new connections, with the certificates that the files hold now, or the last usable ones."""
        return self._certificates.context()

    async def _load_anew(self, before: str) -> None:
        """Once for all calls that found out together."""
        async with self._loading:
            if self._authorization == before:
                self._take(await self._load())

    def _take(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._authorization = loaded.authorization
        self._token_seen: Signature = None
        if loaded.token_path:
            # Taken before the file is read: what changes in between is read again.
            self._token_seen = signature(loaded.token_path)
            self._authorization = f"Bearer {_token(loaded)}"
        self._certificates = _Certificates(loaded)

    def _follow_token(self, *, anew: bool) -> None:
        """A file that is being replaced, or is gone for a moment, leaves the token as it was."""
        seen = signature(self._loaded.token_path)
        if anew or seen != self._token_seen:
            with contextlib.suppress(ConfigError):
                self._authorization = f"Bearer {_token(self._loaded)}"
                self._token_seen = seen

    def _ends_soon(self) -> bool:
        ends = self._loaded.expires_at
        return ends is not None and time.time() > ends - _BEFORE_EXPIRY_S


class _Certificates:
    """The context made of certificates and key; it follows their files."""

    def __init__(self, loaded: Loaded) -> None:
        configuration = loaded.configuration
        given = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        self._paths = tuple(path for path in given if path)
        self._loaded = loaded
        self._seen = tuple(map(signature, self._paths))
        self._held = self._contents()
        self._context = self._made()

    def context(self) -> ssl.SSLContext:
        """Made anew after a change, as long as that can be used."""
        seen = tuple(map(signature, self._paths))
        if seen != self._seen:
            # With each new token all files of a service account are made anew, mostly with what they held.
            held = self._contents()
            if len(held) == len(self._paths):  # else again next time: too many files may have been open
                self._seen = seen
            if held != self._held:
                self._held = held
                with contextlib.suppress(ConfigError):
                    self._context = self._made()
        return self._context

    def _contents(self) -> list[bytes]:
        contents: list[bytes] = []
        for path in self._paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                contents.append(file.read())
        return contents

    def _made(self) -> ssl.SSLContext:
        try:
            made: ssl.SSLContext = RESTClientObject(self._loaded.configuration).ssl_context
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problem = Problem(", ".join(self._paths), f"cannot be used for TLS: {reason}")
            raise ConfigError(self._loaded.source, problem) from None
        return made


async def in_cluster(environment: Mapping[str, str], folder: str = SERVICE_ACCOUNT) -> Access:
    """As the service account of the pod this process runs in. Raises ConfigError."""

    async def load() -> Loaded:
        return _service_account(environment, folder)

    return Access(await load(), load, environment)


async def of_kubeconfig(path: str, environment: Mapping[str, str]) -> Access:
    """As the current context of a kubeconfig says. Raises ConfigError."""

    async def load() -> Loaded:
        return await _kubeconfig(path)

    return Access(await load(), load, environment)


def _service_account(environment: Mapping[str, str], folder: str) -> Loaded:
    source = "in-cluster"
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ConfigError(
            source,
            Problem(
                "",
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: not in a pod of a cluster; "
                "outside of one give --kubeconfig FILE",
            ),
        )
    configuration = _configuration()
    configuration.host = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    configuration.ssl_ca_cert = os.path.join(folder, "ca.crt")
    token_path = os.path.join(folder, "token")
    for needed in (token_path, configuration.ssl_ca_cert):
        if not os.path.isfile(needed):
            raise ConfigError(
                source, Problem(needed, "no such file; is automountServiceAccountToken false for this pod?")
            )
    return Loaded(source, configuration, token_path=token_path)


class _ContextEntry(msgspec.Struct, frozen=True):
    cluster: str
    user: str = ""


class _Context(msgspec.Struct, frozen=True):
    name: str
    context: _ContextEntry


class _ClusterEntry(msgspec.Struct, frozen=True, rename="kebab"):
    server: str
    proxy_url: str = ""


class _NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: _ClusterEntry


class _UserEntry(msgspec.Struct, frozen=True):
    token_file: str = msgspec.field(name="tokenFile", default="")
    exec_plugin: dict[str, Any] | None = msgspec.field(name="exec", default=None)
    auth_provider: dict[str, Any] | None = msgspec.field(name="auth-provider", default=None)
    impersonated: str = msgspec.field(name="as", default="")


class _User(msgspec.Struct, frozen=True):
    name: str
    user: _UserEntry | None = None


class _Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    """As far as the library does not say itself what is wrong."""

    current_context: str = ""
    contexts: tuple[_Context, ...] = ()
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_User, ...] | None = ()


async def _kubeconfig(path: str) -> Loaded:
    user = _checked(path)
    configuration = _configuration()
    try:
        async with asyncio.timeout(_PLUGIN_TIMEOUT_S):
            # What the library persists is a token that a plugin gave; the file is not ours to write.
            loader = await load_kube_config(  # type: ignore[no-untyped-call]
                path, client_configuration=configuration, persist_config=False
            )
    except TimeoutError:
        raise _wrong(path, "", f"no credentials within {_PLUGIN_TIMEOUT_S:g} s") from None
    except Exception as error:
        # The library checks little: a wrong shape comes out as any exception.
        raise _wrong(path, "", str(error) or type(error).__name__) from None
    authorization = _one_line(configuration.api_key.get("BearerToken", ""))
    if user.exec_plugin is not None and not authorization and not configuration.cert_file:
        command = user.exec_plugin.get("command", "")
        raise _wrong(path, "exec", f"{command!r} gave no credentials; the log has its reason")
    token_path = ""
    if user.token_file and user.exec_plugin is None and user.auth_provider is None:
        token_path = _beside(path, user.token_file)
    expiry: datetime.datetime | None = getattr(loader, "exec_plugin_expiry", None)
    return Loaded(
        _source(path),
        configuration,
        "" if token_path else authorization,
        token_path,
        None if expiry is None else expiry.timestamp(),
    )


def _checked(path: str) -> _UserEntry:
    try:
        with open(path, encoding="utf-8") as file:
            config = msgspec.convert(yaml.safe_load(file), _Kubeconfig)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_source(path), Unread.because("", error)) from None
    except yaml.YAMLError as error:
        raise _wrong(path, "", f"neither YAML nor JSON: {' '.join(str(error).split())}") from None
    except msgspec.ValidationError as error:
        raise _wrong(path, "", f"no kubeconfig: {error}") from None
    context = next((one.context for one in config.contexts if one.name == config.current_context), None)
    if context is None:
        known = ", ".join(one.name for one in config.contexts) or "none"
        raise _wrong(path, "current-context", f"{config.current_context!r} is not one of contexts ({known})")
    cluster = next((one.cluster for one in config.clusters if one.name == context.cluster), None)
    if cluster is None:
        raise _wrong(path, "clusters", f"there is no {context.cluster!r}, which the context names")
    if not cluster.server.startswith(("https://", "http://")):
        raise _wrong(path, "clusters", f"server {cluster.server!r} is not a https:// or http:// URL")
    if cluster.proxy_url and not cluster.proxy_url.startswith(("https://", "http://")):
        without_password = re.sub(r"^(\w+://)?.*@", r"\1", cluster.proxy_url)
        raise _wrong(path, "clusters", f"proxy-url {without_password!r}: only http:// and https:// proxies")
    return _checked_user(path, config, context, cluster)


def _checked_user(
    path: str, config: _Kubeconfig, context: _ContextEntry, cluster: _ClusterEntry
) -> _UserEntry:
    user = next((one.user for one in config.users or () if one.name == context.user), None)
    if user is None:
        # A server without TLS, such as `kubectl proxy`, asks for none.
        if not context.user and cluster.server.startswith("http://"):
            return _UserEntry()
        raise _wrong(path, "users", f"there is no {context.user!r}, which the context names")
    if user.impersonated:
        raise _wrong(path, "users", "as: acting as another user is not supported")
    return user


def _beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), name)


def _wrong(path: str, field: str, message: str) -> ConfigError:
    return ConfigError(_source(path), Problem(field, message))


def _source(path: str) -> str:
    return f"--kubeconfig {path}"


def _configuration() -> Configuration:
    configuration = Configuration()
    # Authorities of clusters often lack extensions that newer Pythons insist on.
    configuration.disable_strict_ssl_verification = True
    return configuration


def _token(loaded: Loaded) -> str:
    try:
        with open(loaded.token_path, encoding="ascii") as file:
            token = _one_line(file.read())
    except UnicodeDecodeError:
        raise ConfigError(loaded.source, Problem(loaded.token_path, "cannot be read: not a token")) from None
    except OSError as error:
        raise ConfigError(loaded.source, Unread.because(loaded.token_path, error)) from None
    if not token or not token.isprintable():
        raise ConfigError(loaded.source, Problem(loaded.token_path, "holds no token"))
    return token


def _one_line(token: str) -> str:
    return token.strip()


def proxy_of(url: str, environment: Mapping[str, str]) -> str | None:
    """The proxy that HTTPS_PROXY or HTTP_PROXY names for `url`, unless NO_PROXY holds its host; None = none.

    NO_PROXY is a comma list of names (with their subdomains), addresses, networks such as 10.0.0.0/8, or `*`.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    proxy = _variable(environment, f"{parts.scheme}_proxy")
    if not proxy or host == "localhost":
        return None
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
    if address is not None and address.is_loopback:
        return None
    spared = _variable(environment, "no_proxy").lower().split(",")
    if any(_spares(entry.strip(), host, address) for entry in spared):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _spares(entry: str, host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if entry == "*":
        return True
    if address is not None:
        with contextlib.suppress(ValueError):
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
        return False
    name = entry.lstrip("*").lstrip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))
