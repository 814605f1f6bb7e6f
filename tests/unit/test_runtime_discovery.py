"""Endpoint files and flags: what is accepted, and every problem named at once."""

import json
import random
from pathlib import Path

import pytest

from epp.errors import ConfigError
from epp.pool.records import Endpoint
from epp.runtime.discovery import FileDiscovery, endpoints_from_file, endpoints_from_flags

GO_FILE = b"""\
endpoints:
  - name: vllm-0
    address: "10.0.0.1"
    port: "8000"
  - name: vllm-1
    namespace: serving
    address: 10.0.0.2
    port: 8000
    labels:
      llm-d.ai/role: prefill
"""


def problems_of(content: bytes | str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        endpoints_from_file(content.encode() if isinstance(content, str) else content, "pool.yaml")
    assert str(raised.value).startswith("pool.yaml: ")
    return [str(problem) for problem in raised.value.problems]


def one(**fields: object) -> str:
    entry = {"name": "a", "address": "10.0.0.1", "port": "8000"} | fields
    return json.dumps({"endpoints": [{key: value for key, value in entry.items() if value != "absent"}]})


def test_the_go_form_loads() -> None:
    assert endpoints_from_file(GO_FILE, "pool.yaml") == [
        Endpoint("default/vllm-0@10.0.0.1:8000", "vllm-0", "default", "10.0.0.1", 8000, {}, "vllm-0"),
        Endpoint(
            "serving/vllm-1@10.0.0.2:8000",
            "vllm-1",
            "serving",
            "10.0.0.2",
            8000,
            {"llm-d.ai/role": "prefill"},
            "vllm-1",
        ),
    ]


def test_json_loads_as_yaml_does() -> None:
    assert endpoints_from_file(one().encode(), "pool.json")[0].host_port == "10.0.0.1:8000"


@pytest.mark.parametrize("port", [1, 80, 9999, 10_000, 65_535])
def test_a_port_is_a_number_or_its_digits(port: int) -> None:
    for written in (port, str(port)):
        assert endpoints_from_file(one(port=written).encode(), "f")[0].port == port
    assert endpoints_from_flags([f"10.0.0.1:{port}"])[0].port == port


def test_several_ports_are_ranks() -> None:
    found = endpoints_from_file(one(port="absent", ports=["8000", 8001]).encode(), "f")
    assert [(e.name, e.host_port, e.uid) for e in found] == [
        ("a-rank-0", "10.0.0.1:8000", "default/a@10.0.0.1:8000"),
        ("a-rank-1", "10.0.0.1:8001", "default/a@10.0.0.1:8001"),
    ]


@pytest.mark.parametrize(
    ("address", "host_port"),
    [
        ("fd00::1", "[fd00::1]:8000"),
        ("FD00:0:0::0001", "[fd00::1]:8000"),
        ("localhost", "127.0.0.1:8000"),
        ("127.0.0.1", "127.0.0.1:8000"),
    ],
)
def test_addresses(address: str, host_port: str) -> None:
    assert endpoints_from_file(one(address=address).encode(), "f")[0].host_port == host_port


def test_an_empty_pool_is_a_pool() -> None:
    assert endpoints_from_file(b"endpoints: []", "f") == []


def test_the_same_name_at_a_new_address_is_a_new_endpoint() -> None:
    before = endpoints_from_file(one().encode(), "f")[0]
    after = endpoints_from_file(one(address="10.0.0.9").encode(), "f")[0]
    assert before.uid != after.uid


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "$: must be a mapping with the field `endpoints`"),
        ("[]", "$: must be a mapping with the field `endpoints`"),
        ("endpoints:", "$.endpoints: must be a list; `[]` for an empty pool"),
        ("endpoints: [3]", "$.endpoints[0]: must be a mapping with `name`, `address` and `port`"),
        ("endpoint: []\nendpoints: []", "$.endpoint: unknown field; did you mean `endpoints`?"),
        (one(adress="x"), "$.endpoints[0].adress: unknown field; did you mean `address`?"),
        (one(weight=1), "unknown field; known are name, namespace, address, port, ports, labels"),
        (one(name="absent"), "$.endpoints[0].name: is missing"),
        (one(name=""), "$.endpoints[0].name: must be text without spaces, such as vllm-0"),
        (one(name="a b"), "$.endpoints[0].name: must be text without spaces, such as vllm-0"),
        (one(namespace=7), "$.endpoints[0].namespace: must be text without spaces, such as vllm-0"),
        (one(address="absent"), "$.endpoints[0].address: is missing"),
        (one(address="vllm.local"), "'vllm.local' is no IP address; host names are not resolved"),
        (one(address="10.0.0.256"), "'10.0.0.256' is no IP address; host names are not resolved"),
        (one(address="[::1]"), "'[::1]' is no IP address; host names are not resolved"),
        (one(address=1.2), "$.endpoints[0].address: must be an IP address as text; put it in quotes"),
        (one(address="fe80::1%eth0"), "'fe80::1%eth0' has a zone, which the proxy cannot use"),
        (one(address="0.0.0.0"), "'0.0.0.0' is no address that one server answers at"),
        (one(port="absent"), "$.endpoints[0].port: is missing"),
        (one(port="0"), "$.endpoints[0].port: '0' is no port; it must be a number from 1 to 65535"),
        (one(port="65536"), "'65536' is no port"),
        (one(port=-1), "'-1' is no port"),
        (one(port=True), "'True' is no port"),
        (one(port="80a"), "'80a' is no port"),
        (one(port=[8000]), "'list' is no port"),
        (one(ports=[1]), "$.endpoints[0].ports: give either `port` or `ports`"),
        (one(port="absent", ports=[]), "$.endpoints[0].ports: must be a list of ports"),
        (one(port="absent", ports=[8000, "x"]), "$.endpoints[0].ports[1]: 'x' is no port"),
        (
            one(port="absent", ports=[8000, 8000]),
            "10.0.0.1:8000 is already the address of $.endpoints[0].ports[0]",
        ),
        (one(labels=[1]), "$.endpoints[0].labels: must be a mapping of text to text"),
        (one(labels={"rank": 1}), "$.endpoints[0].labels.rank: must be text; put it in quotes"),
        (one(labels={"a": "b\n"}), "$.endpoints[0].labels.a: holds characters that cannot be printed"),
        ("endpoints: [", "neither YAML nor JSON: "),
        ("[" * 5000, "neither YAML nor JSON: "),
        ("a: !!timestamp x", "neither YAML nor JSON: "),
        (b"\xff\xff", "neither YAML nor JSON: "),
    ],
)
def test_what_is_wrong_is_named(content: str | bytes, expected: str) -> None:
    assert any(expected in problem for problem in problems_of(content))


def test_names_and_addresses_are_given_once() -> None:
    entry = {"name": "a", "address": "10.0.0.1", "port": 8000}
    content = json.dumps({"endpoints": [entry, entry, entry | {"namespace": "other", "port": 8001}]})
    assert problems_of(content) == [
        "$.endpoints[1].port: the name default/a is already taken by $.endpoints[0].port",
        "$.endpoints[1].port: 10.0.0.1:8000 is already the address of $.endpoints[0].port",
    ]


def test_all_problems_come_at_once_but_not_without_end() -> None:
    assert len(problems_of(json.dumps({"endpoints": [{"address": "x", "port": 0}] * 3}))) == 9
    many = problems_of(json.dumps({"endpoints": [1] * 1000}))
    assert len(many) == 51
    assert many[-1] == "and 950 more problems"


def test_a_value_of_any_length_fits_into_a_message() -> None:
    assert all(len(problem) < 200 for problem in problems_of(one(address="9" * 100_000, port="x" * 100_000)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as raised:
            FileDiscovery(str(path), False, lambda endpoints: None).load()
        return str(raised.value)

    assert (
        message(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"
    )
    assert message(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    large = tmp_path / "large.yaml"
    large.write_bytes(b"endpoints: []\n" + b"#" * (1 << 20))
    assert message(large) == f"{large}: larger than 1 MiB"
    large.write_bytes((b"endpoints: []\n" + b"#" * (1 << 20))[: 1 << 20])
    assert FileDiscovery(str(large), False, lambda endpoints: None).load() == []


def test_garbage_never_escapes_as_another_error() -> None:
    draw = random.Random(3)
    seeds = [GO_FILE, one(port="absent", ports=[1, 2], labels={"a": "b"}).encode()]
    splices = [
        b"&a ",
        b"*a",
        b"!!int ",
        b"!!float",
        b"!!binary x",
        b"? ",
        b"<<: ",
        b"- ",
        b"{",
        b"\t",
        b"9" * 5000,
    ]
    loaded = refused = 0
    for _ in range(2000):
        content = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(content) + 1)
            match draw.randrange(4):
                case 0:
                    content[at : at + draw.randrange(8)] = b""
                case 1:
                    content[at:at] = draw.choice(splices)
                case 2:
                    content[at:at] = draw.randbytes(draw.randrange(4))
                case _:
                    content[at : at + 1] = bytes([draw.randrange(32, 127)])
        try:
            for endpoint in endpoints_from_file(bytes(content), "f"):
                assert 1 <= endpoint.port <= 65535
                assert endpoint.name
            loaded += 1
        except ConfigError:
            refused += 1
    assert loaded > 100
    assert refused > 100


def test_flags() -> None:
    found = endpoints_from_flags(["10.0.0.1:8000", "[fd00::1]:8001", "b=localhost:8002"])
    assert [(e.name, e.host_port, e.uid) for e in found] == [
        ("10.0.0.1:8000", "10.0.0.1:8000", "default/10.0.0.1:8000@10.0.0.1:8000"),
        ("[fd00::1]:8001", "[fd00::1]:8001", "default/[fd00::1]:8001@[fd00::1]:8001"),
        ("b", "127.0.0.1:8002", "default/b@127.0.0.1:8002"),
    ]
    assert endpoints_from_flags([]) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10.0.0.1", "must be host:port or [IPv6 address]:port"),
        ("fd00::1:8000", "must be host:port or [IPv6 address]:port"),
        ("", "must be host:port or [IPv6 address]:port"),
        ("engine:8000", "'engine' is no IP address"),
        ("10.0.0.1:", "'' is no port"),
        ("10.0.0.1:99999", "'99999' is no port"),
        ("[10.0.0.1:8000", "is no IP address"),
    ],
)
def test_wrong_flags(value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        endpoints_from_flags(["a=10.9.9.9:1", value, "a=10.9.9.9:1"])
    text = str(raised.value)
    assert expected in text
    assert "10.9.9.9:1 is already the address" in text, "the other problems are named as well"
    assert text.startswith("--endpoint: ")
