"""What a figure was measured on, and what else ran meanwhile."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
SCHEDULED = 2
"""Of the clocks of a process (clock_getcpuclockid(3)) the one in nanoseconds."""


def describe() -> dict[str, str | int]:
    """Processor, cores, memory, kernel, Python and the libraries that a row spends its time in."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    clock = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("cpu MHz")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cpu_mhz": round(float(clock[0].partition(":")[2])) if clock else 0,
        "cores": os.cpu_count() or 0,
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("grpcio", "protobuf", "numpy", "msgspec", "xxhash", "aiohttp")},
    }


class Neighbours:
    """CPU that other programs used since this was made; children of ours count as ours once reaped."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy_s = _machine_busy_s()
        self._ours_s = _ours_s()

    def cores(self) -> float:
        others_s = _machine_busy_s() - self._busy_s - (_ours_s() - self._ours_s)
        return max(others_s, 0.0) / max(time.monotonic() - self._began, 1e-9)


def process_cpu_s(pid: int) -> float:
    """CPU seconds a process used so far, all its threads, children that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    children_s = (int(fields[13]) + int(fields[14])) / TICKS_A_SECOND
    # The kernel's clock of the process counts threads that have ended, so it never runs backwards.
    return time.clock_gettime(~pid << 3 | SCHEDULED) + children_s


def resident_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _machine_busy_s() -> float:
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_A_SECOND


def _ours_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
