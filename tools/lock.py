"""Write the lock files under requirements/ from pyproject.toml (`make lock`).

Every file pins versions with hashes for all platforms and Python 3.11 onwards, and holds no address of a
registry: the one that `pip` is configured for serves it. Pins stay as they are while they still satisfy
pyproject.toml; `--upgrade` moves all of them to the newest that do.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMPILE = (
    "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
    "--generate-hashes", "--no-emit-index-url", "--custom-compile-command", "make lock",
)  # fmt: skip

# Output, then what goes in. The picker's own lock follows the developers', so that both agree on versions.
LOCKS = (
    ("dev.txt", ("pyproject.toml", "--all-extras", "--group", "dev")),
    ("runtime.txt", ("pyproject.toml", "--constraints", "requirements/dev.txt")),
    ("envoy.txt", ("--group", "pyproject.toml:envoy")),
    ("fuzz.txt", ("pyproject.toml", "--group", "fuzz", "--constraints", "requirements/dev.txt")),
    ("lock.txt", ("--group", "pyproject.toml:lock")),
)


def main(uv: str, *options: str) -> None:
    for name, sources in LOCKS:
        output = f"requirements/{name}"
        subprocess.run([uv, *COMPILE, *options, *sources, "--output-file", output], cwd=ROOT, check=True)
        print(f"wrote {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
