"""One target in this process, which atheris then owns.

python -m fuzz.one TARGET [libFuzzer options] [corpus ... | input]
"""

import sys

import atheris

with atheris.instrument_imports(include=["epp"]):
    from fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()
