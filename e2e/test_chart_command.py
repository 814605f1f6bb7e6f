"""`warmroute serve --validate-only` with the arguments, environment and files that the chart renders."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import helm_python

from epp.runtime.tls import self_signed
from tests.contract.test_chart_render import MATRIX
from tests.contract.test_config_reference import DATA, LOADS
from tests.data.chart.rendering import Object, configuration, container, objects, values

POD: Final = {"NAMESPACE": "ns", "POD_NAME": "rel-epp-5d8f7c9b6-x2x4q", "NODE_NAME": "node"}
ENDPOINTS: Final = "/etc/warmroute/endpoints.yaml"

# What takes time is loading the command, so that is done once; each start is a process of its own after that.
_EACH: Final = """\
import json, os, sys
import epp.runtime.app
from epp.cli import main

for number, (arguments, environment) in enumerate(json.load(sys.stdin)):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    log = os.open(f"{number}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    main()
"""


class Start(NamedTuple):
    """One of the command, with paths as they are on this machine."""

    arguments: list[str]
    environment: dict[str, str]


def faults(starts: dict[str, Start], folder: Path) -> dict[str, str]:
    """Last words of those that did not end well, by name."""
    command = [sys.executable, "-c", _EACH]
    wanted = json.dumps(list(starts.values()))
    run = subprocess.run(command, cwd=folder, input=wanted, stdout=subprocess.PIPE, text=True, check=True)
    statuses = [int(line) for line in run.stdout.split()]
    assert len(statuses) == len(starts)
    said = [(folder / f"{number}.log").read_text().strip() for number in range(len(starts))]
    ended = zip(starts, statuses, said, strict=True)
    return {name: words for name, status, words in ended if status or "are right" not in words}


def start(given: Object, folder: Path) -> Start:
    """As the picker's container is started, but that what is mounted in it is in `folder`."""
    found = objects(given)
    picker = container(found)
    files = folder / "config"
    files.mkdir(parents=True)
    (folder / "endpoints.yaml").write_text("endpoints: [{name: a, address: 127.0.0.1, port: '8000'}]\n")
    for name, text in configuration(found).items():
        (files / name).write_text(text.replace(ENDPOINTS, str(folder / "endpoints.yaml")))
    key, certificate = self_signed()
    for name in ("certs", "metrics"):
        (folder / name).mkdir()
        (folder / name / "tls.crt").write_bytes(certificate)
        (folder / name / "tls.key").write_bytes(key)
    mounted = ("config", "certs", "metrics")
    arguments = [here(each, mounted, folder) for each in picker["args"]]
    assert picker["command"] == ["warmroute", "serve"]
    variables = {each["name"]: each["value"] for each in picker["env"] if "value" in each}
    return Start(["serve", *arguments, "--validate-only"], POD | variables)


def here(argument: str, mounted: Sequence[str], folder: Path) -> str:
    flag, equals, value = argument.partition("=")
    at_home = any(value == f"/{each}" or value.startswith(f"/{each}/") for each in mounted)
    return f"{flag}{equals}{folder}{value}" if at_home else argument


def test_the_command_takes_what_is_rendered(tmp_path: Path) -> None:
    starts = {case: start(values(given), tmp_path / case) for case, given in MATRIX.items()}
    assert faults(starts, tmp_path) == {}


def test_configurations_of_the_field_load_as_values(tmp_path: Path) -> None:
    """Each as a text in a file of its own, and as an object."""
    starts = {}
    for name in sorted(LOADS):
        text = (DATA / f"{name}.yaml").read_text()
        as_text = {"pluginsCustomConfig": {"own.yaml": text}, "pluginsConfigFile": "own.yaml"}
        as_object = {"pluginsConfig": helm_python.values_from_yaml(text)}
        for form, given in (("text", as_text), ("object", as_object)):
            epp = {**given, "flags": {"allow-experimental-plugins": True}}
            case = f"{name}-{form}"
            starts[case] = start(values({"router": {"epp": epp}}), tmp_path / case)
    assert faults(starts, tmp_path) == {}


def test_a_fault_of_a_template_would_be_told(tmp_path: Path) -> None:
    said = {
        "a lost value": "its own is missing",
        "a misspelt flag": "No such option '--confg-file'",
        "a misspelt plugin": "queue-scorre",
        "a lost file": "cannot be read",
    }
    starts = {}
    for fault in said:
        starts[fault] = arguments, _ = start(values({}), tmp_path / fault.replace(" ", "-"))
        (config,) = [each for each in arguments if each.startswith("--config-file=")]
        file, place = Path(config.partition("=")[2]), arguments.index(config)
        match fault:
            case "a lost value":
                arguments[place] = "--config-file"
            case "a misspelt flag":
                arguments[place] = config.replace("config", "confg", 1)
            case "a misspelt plugin":
                file.write_text(file.read_text().replace("queue-scorer", "queue-scorre", 1))
            case "a lost file":
                file.unlink()
    told = faults(starts, tmp_path)
    assert {fault: words for fault, words in said.items() if words not in told[fault]} == {}
