"""Endpoints from a file (the `file-discovery` format) or from the command line."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from epp.errors import ConfigError, Problem, Unread
from epp.pool.records import Endpoint
from epp.runtime.watch import Followed

MAX_FILE_BYTES: Final = 1 << 20
POLL_S: Final = 0.5
SHOWN_PROBLEMS: Final = 50
DEFAULT_NAMESPACE: Final = "default"

_FIELDS: Final = ("name", "namespace", "address", "port", "ports", "labels")


class FileDiscovery:
    """The pool's endpoints from a YAML or JSON file.

    `endpoints` is a list of entries: `name`, `address` (an IP address or `localhost`), `port`, and if
    wanted `namespace` (default `default`) and `labels`. `ports` in place of `port` gives one endpoint per
    port, named `<name>-rank-<index>`.
    """

    def __init__(
        self,
        path: str,
        watch: bool,
        apply: Callable[[list[Endpoint]], None],
        on_error: Callable[[str], None] = lambda message: None,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._path = path
        self._watch = watch
        self._apply = apply
        self._on_error = on_error
        self._poll_s = poll_s
        self._file = Followed(path)

    def load(self) -> list[Endpoint]:
        """Read the file.

        Raises:
            ConfigError: it cannot be used; names every problem with its field path.
        """
        content = _read(self._path)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(self._path, Problem("", "larger than 1 MiB"))
        return endpoints_from_file(content, self._path)

    async def run(self) -> None:
        """Follow the file until cancelled; return at once when it is not to be watched.

        A changed file is read once it has kept still for one poll, so that one half written is not taken
        for a smaller pool. One that cannot be used is reported, and the endpoints stay as they are, until it
        changes; one that cannot be read is tried again.
        """
        while self._watch:
            await self._file.changed(poll_s=self._poll_s, settle_s=self._poll_s)
            await self._reload()

    async def _reload(self) -> None:
        try:
            endpoints = await asyncio.to_thread(self.load)
        except ConfigError as error:
            if self._file.failed(error):
                self._on_error(f"{error}\nthe endpoints stay as they were")
        else:
            self._apply(endpoints)


def _read(path: str) -> bytes:
    """At most a byte more than is taken."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(path, Unread.because("", error)) from None


def endpoints_from_file(content: bytes, source: str) -> list[Endpoint]:
    """The endpoints of a file's content; `source` names it in errors.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        document = msgspec.yaml.decode(content)
    except Exception as error:  # PyYAML's constructors let many kinds of exception through
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(source, Problem("", f"neither YAML nor JSON: {reason}")) from None
    problems: list[Problem] = []
    endpoints = _Entries(problems).document(document)
    _raise(source, problems)
    return endpoints


def _raise(source: str, problems: list[Problem]) -> None:
    if len(problems) > SHOWN_PROBLEMS:
        more = Problem("", f"and {len(problems) - SHOWN_PROBLEMS} more problems")
        problems = [*problems[:SHOWN_PROBLEMS], more]
    if problems:
        raise ConfigError(source, *problems)


class _Entries:
    """Turns decoded entries into endpoints and notes everything that is wrong with them."""

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self._names: dict[tuple[str, str], str] = {}
        self._host_ports: dict[str, str] = {}

    def document(self, document: Any) -> list[Endpoint]:
        if not isinstance(document, dict):
            self._wrong("$", "must be a mapping with the field `endpoints`")
            return []
        self._unknown_fields("$", document, ("endpoints",))
        entries = document.get("endpoints")
        if not isinstance(entries, list):
            self._wrong("$.endpoints", "must be a list; `[]` for an empty pool")
            return []
        found = []
        for index, entry in enumerate(entries):
            found += self._entry(f"$.endpoints[{index}]", entry)
        return found

    def _entry(self, path: str, entry: Any) -> list[Endpoint]:
        if not isinstance(entry, dict):
            self._wrong(path, "must be a mapping with `name`, `address` and `port`")
            return []
        self._unknown_fields(path, entry, _FIELDS)
        name = self._text(f"{path}.name", entry.get("name"))
        namespace = self._text(f"{path}.namespace", entry.get("namespace", DEFAULT_NAMESPACE))
        address = self._address(f"{path}.address", entry.get("address"))
        ports = self._ports(path, entry)
        labels = self._labels(f"{path}.labels", entry.get("labels"))
        if name is None or namespace is None or address is None:
            return []
        return [
            self.add(field_path, Endpoint("", name + suffix, namespace, address, port, labels, name), name)
            for field_path, suffix, port in ports
        ]

    def add(self, path: str, endpoint: Endpoint, base_name: str) -> Endpoint:
        """Give the endpoint its identity; another of the same name or address is a problem."""
        namespace, name, host_port = endpoint.namespace, endpoint.name, endpoint.host_port
        if (namespace, name) in self._names:
            first = self._names[namespace, name]
            self._wrong(path, f"the name {namespace}/{name} is already taken by {first}")
        if host_port in self._host_ports:
            self._wrong(path, f"{host_port} is already the address of {self._host_ports[host_port]}")
        self._names[namespace, name] = self._host_ports[host_port] = path
        return msgspec.structs.replace(endpoint, uid=f"{namespace}/{base_name}@{host_port}")

    def _wrong(self, path: str, message: str) -> None:
        self._problems.append(Problem(path, message))

    def _unknown_fields(self, path: str, entry: dict[Any, Any], known: tuple[str, ...]) -> None:
        for field in entry:
            if field not in known:
                near = get_close_matches(_shown(field), known, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
                self._wrong(f"{path}.{_shown(field)}", f"unknown field; {hint}")

    def _text(self, path: str, value: Any) -> str | None:
        if isinstance(value, str) and value and value.isprintable() and " " not in value:
            return value
        self._wrong(path, "is missing" if value is None else "must be text without spaces, such as vllm-0")
        return None

    def _address(self, path: str, value: Any) -> str | None:
        if value is None:
            self._wrong(path, "is missing")
            return None
        try:
            return parse_address(value)
        except ValueError as error:
            self._wrong(path, str(error))
            return None

    def _ports(self, path: str, entry: dict[Any, Any]) -> list[tuple[str, str, int]]:
        """Field path, suffix of the name and number of each port."""
        if "ports" not in entry:
            port = self._port(f"{path}.port", entry.get("port"))
            return [] if port is None else [(f"{path}.port", "", port)]
        if "port" in entry:
            self._wrong(f"{path}.ports", "give either `port` or `ports`")
        values = entry["ports"]
        if not isinstance(values, list) or not values:
            self._wrong(f"{path}.ports", "must be a list of ports")
            return []
        found = []
        for rank, value in enumerate(values):
            port = self._port(f"{path}.ports[{rank}]", value)
            if port is not None:
                found.append((f"{path}.ports[{rank}]", f"-rank-{rank}", port))
        return found

    def _port(self, path: str, value: Any) -> int | None:
        if value is None:
            self._wrong(path, "is missing")
            return None
        try:
            return parse_port(value)
        except ValueError as error:
            self._wrong(path, str(error))
            return None

    def _labels(self, path: str, value: Any) -> dict[str, str]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(path, "must be a mapping of text to text")
            return {}
        for key, label in value.items():
            if not isinstance(key, str) or not isinstance(label, str):
                self._wrong(f"{path}.{_shown(key)}", "must be text; put it in quotes")
            elif not key.isprintable() or not label.isprintable():
                self._wrong(f"{path}.{_shown(key)}", "holds characters that cannot be printed")
        return value


def parse_address(value: object) -> str:
    """The one spelling of an IP address, IPv6 without brackets; `localhost` is 127.0.0.1.

    The proxy is told addresses and resolves no names.

    Raises:
        ValueError: it is something else.
    """
    if value == "localhost":
        return "127.0.0.1"
    if not isinstance(value, str):
        raise ValueError("must be an IP address as text; put it in quotes")
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{_shown(value)!r} is no IP address; host names are not resolved") from None
    if getattr(address, "scope_id", None) is not None:
        raise ValueError(f"{value!r} has a zone, which the proxy cannot use")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{value!r} is no address that one server answers at")
    return str(address)


def parse_port(value: object) -> int:
    """A port from a number or its digits.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    raise ValueError(f"{_shown(value)!r} is no port; it must be a number from 1 to 65535")


def _shown(value: object) -> str:
    """As much of a value as an error message can bear."""
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= 60 and text.isprintable() else f"{ascii(text[:60])[1:-1]}..."


def endpoints_from_flags(values: Sequence[str]) -> list[Endpoint]:
    """Endpoints from `host:port`, `[v6]:port`, each with an optional `name=` in front.

    Without a name, the endpoint is called by its address and port.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[Problem] = []
    entries = _Entries(problems)
    endpoints = []
    for value in values:
        name, _, target = value.rpartition("=")
        host, colon, port = target.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            if not colon or (":" in host and not bracketed):
                raise ValueError("must be host:port or [IPv6 address]:port, with name= in front if wanted")
            endpoint = Endpoint(
                "",
                name,
                DEFAULT_NAMESPACE,
                parse_address(host[1:-1] if bracketed else host),
                parse_port(port),
                pod=name,
            )
        except ValueError as error:
            problems.append(Problem(repr(value), str(error)))
            continue
        endpoint = msgspec.structs.replace(endpoint, name=name or endpoint.host_port)
        endpoints.append(entries.add(repr(value), endpoint, endpoint.name))
    _raise("--endpoint", problems)
    return endpoints
