"""Fuzz with coverage as the guide: python fuzz/run.py [--seconds N] [--target NAME]

Each target runs in a process of its own, one after the other. What it found worth keeping stays in
`out/fuzz/corpus`, so that the next run goes on from there; an input that failed is written to `out/fuzz`.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT / "fuzz" / "corpus"
OUT = ROOT / "out" / "fuzz"

SECONDS = 20
INPUT_BYTES = 4096
INPUT_S = 10
MEMORY_MB = 1024
GRACE_S = 300  # a machine with much else to do is slow to instrument

# A line of libFuzzer: "#4096 pulse  cov: 812 ft: 2103 corp: 119/5210b ..."
STATE = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: \d+ corp: (\d+)/", re.MULTILINE)
RUNS = re.compile(r"^Done (\d+) runs|^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Result:
    """`failures`: files with inputs that failed. `log`: all that was said."""

    target: str
    failed: bool
    runs: int
    coverage: int
    corpus: int
    failures: tuple[Path, ...]
    log: Path

    def __str__(self) -> str:
        line = f"{self.target:10} {self.runs:>9} runs, coverage {self.coverage}, corpus {self.corpus}"
        if not self.failed:
            return line
        inputs = ", ".join(str(file.relative_to(ROOT)) for file in self.failures) or "no input was written"
        return f"{line}, FAILED: {inputs}; see {self.log.relative_to(ROOT)}"


def fuzz(target: str, seconds: int, seed: int) -> Result:
    corpus, log = OUT / "corpus" / target, OUT / f"{target}.log"
    corpus.mkdir(parents=True, exist_ok=True)
    before = _failures(target)
    command = [
        *(sys.executable, "-m", "fuzz.one", target),
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES}",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={OUT}/{target}-",
        f"-seed={seed}",
        "-print_final_stats=1",
        str(corpus),
        *([str(SEEDS / target)] if (SEEDS / target).is_dir() else []),
    ]
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds + GRACE_S,
                check=False,
            )
            failed = done.returncode != 0
        except subprocess.TimeoutExpired:
            failed = True
    said = log.read_text(errors="replace")
    runs, coverage, size = figures(said)
    return Result(target, failed, runs, coverage, size, tuple(sorted(_failures(target) - before)), log)


def _failures(target: str) -> set[Path]:
    return {file for file in OUT.glob(f"{target}-*") if file.is_file()}


def figures(said: str) -> tuple[int, int, int]:
    """Runs, coverage and size of the corpus, as last told; 0 where nothing was."""
    states, runs = STATE.findall(said), RUNS.findall(said)
    last = states[-1] if states else ("0", "0", "0")
    return max([int(last[0]), *(int(first or second) for first, second in runs)]), int(last[1]), int(last[2])


def main() -> None:
    from fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description="Fuzz with coverage as the guide.")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"for each target ({SECONDS})")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this one; may be repeated"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the fuzzer's choices (1; 0: another in each run)"
    )
    given = parser.parse_args()
    if find_spec("atheris") is None:
        sys.exit(f"atheris is not installed for {sys.executable}; `make fuzz` has it installed in .venv-fuzz")
    results = []
    for target in given.target or TARGETS:
        results.append(fuzz(target, given.seconds, given.seed))
        sys.stdout.write(f"{results[-1]}\n")
        sys.stdout.flush()
    sys.exit(any(result.failed for result in results))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
