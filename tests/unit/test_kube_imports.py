"""What only a picker in Kubernetes needs is not loaded by one that is not there."""

import json
import subprocess
import sys

import pytest

NEEDED_IN_KUBERNETES = {"kubernetes", "epp.runtime.kube", "epp.runtime.in_cluster"}


def loaded(program: str) -> set[str]:
    """What of it a new interpreter has loaded after running `program`."""
    told = f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return NEEDED_IN_KUBERNETES & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "program",
    [
        "import epp.runtime.app",
        "import epp.cli",
        "from epp.runtime import app, options\napp.validate(options.Options(endpoint=('127.0.0.1:8000',)))",
    ],
    ids=["app", "command", "endpoints-by-flag"],
)
def test_kubernetes_is_not_loaded_elsewhere(program: str) -> None:
    assert loaded(program) == set()


def test_it_is_seen_where_it_is_loaded() -> None:
    assert loaded("import epp.runtime.app, epp.runtime.in_cluster") == NEEDED_IN_KUBERNETES
