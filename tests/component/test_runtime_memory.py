"""Memory that bodies took is kept for the next ones."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from epp.runtime import memory

if sys.argv[1] == "kept":
    memory.keep_freed_memory()

def bodies():
    made = [bytes(2_000_000) for _ in range(4)]

for _ in range(3):
    bodies()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bodies()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_cleared(how: str) -> int:
    """While ten times 8 MB are taken and given back."""
    ran = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")
def test_pages_of_bodies_are_cleared_once() -> None:
    usual = pages_cleared("as it is")
    assert usual > 1000
    assert pages_cleared("kept") < usual / 10


def test_other_libraries_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from epp.runtime import memory

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.keep_freed_memory()
