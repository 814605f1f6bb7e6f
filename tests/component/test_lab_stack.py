"""Child processes of the lab: their ports, and what is said when one does not come up."""

import socket
from pathlib import Path

import pytest

from epp.lab.stack import HOST, Gateway, LabEngines, Picker, Ports, StackError
from epp.lab.workload import Fleet

FLEET = Fleet(
    engines=1,
    fit="llama-8b-h100",
    num_blocks=128,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=1024,
)


def test_ports_are_free_and_not_given_twice_before_their_turn() -> None:
    ports = Ports(range(32_000, 32_100))
    taken = ports.take(1)[0]
    with socket.create_server((HOST, taken)):
        found = [*ports.take(40), *ports.take(50)]
        assert len({*found, taken}) == 91
        assert taken not in ports.take(90), "all have had their turn by now"


async def test_engines_come_up_and_end(tmp_path: Path) -> None:
    async with LabEngines(FLEET, "m", tmp_path) as engines:
        assert [each.port for each in (await engines.stats()).engines] == engines.ports
    assert engines.child.returncode == 0


async def test_engines_that_do_not_come_up(tmp_path: Path) -> None:
    engines = LabEngines(FLEET, "m", tmp_path)
    engines.child.command = [*engines.child.command, "--no-such-option"]
    with pytest.raises(StackError, match="(?s)did not come up; its last output:.*--no-such-option"):
        await engines.__aenter__()


async def test_picker_that_does_not_come_up(tmp_path: Path) -> None:
    picker = Picker(tmp_path, [], config="plugins: 7")
    with pytest.raises(StackError, match=r"(?s)the picker did not come up; its last output:.*\$.plugins"):
        await picker.start()


async def test_edit_of_what_envoy_is_not_told(tmp_path: Path) -> None:
    gateway = Gateway([(HOST, 1)], tmp_path, Path("no-envoy"), edits={"no such line": ""})
    with pytest.raises(StackError, match="0 times: no such line"):
        await gateway.__aenter__()
    assert gateway.pickers[0].child.returncode is not None
