"""Write the lock files under requirements/ from pyproject.toml (`make lock`).

Every file pins versions with hashes for all platforms and Python 3.11 onwards, and holds no address of a
registry: the one that `pip` is configured for serves it. Pins stay as they are while they still satisfy
pyproject.toml; `--upgrade` moves all of them to the newest that do.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMPILE = (
    "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
    "--generate-hashes", "--no-emit-index-url", "--custom-compile-command", "make lock",
)  # fmt: skip

AS_DEVELOPERS = ("--constraints", "requirements/dev.txt")
# Output, then what goes in; `-` is what the build asks for. What is shipped follows the developers' lock, so
# that both agree on versions.
LOCKS = (
    ("dev.txt", ("pyproject.toml", "--all-extras", "--group", "dev")),
    ("runtime.txt", ("pyproject.toml", *AS_DEVELOPERS)),
    ("image.txt", ("pyproject.toml", "--extra", "cel", "--extra", "otel", *AS_DEVELOPERS)),
    ("build.txt", ("-", *AS_DEVELOPERS)),
    ("envoy.txt", ("--group", "pyproject.toml:envoy")),
    ("fuzz.txt", ("pyproject.toml", "--group", "fuzz", *AS_DEVELOPERS)),
    ("lock.txt", ("--group", "pyproject.toml:lock")),
)


def main(uv: str, *options: str) -> None:
    build = "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    for name, sources in LOCKS:
        output = f"requirements/{name}"
        command = [uv, *COMPILE, *options, *sources, "--output-file", output]
        subprocess.run(command, cwd=ROOT, check=True, input=build, text=True)
        print(f"wrote {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
