"""Guards of the repository's shape: what would break imports, leak an address, or grow without bound."""

import ast
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "epp" / "wire"

# Assembled, so that this file does not name what it forbids.
REGISTRIES = tuple(
    ".".join(labels)
    for labels in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("crates", "io"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("yarnpkg", "com"),
        ("proxy", "golang", "org"),
        ("sum", "golang", "org"),
        ("maven", "org"),
        ("rubygems", "org"),
        ("docker", "io"),
        ("hub", "docker", "com"),
        ("quay", "io"),
        ("ghcr", "io"),
        ("gcr", "io"),
        ("pkg", "dev"),
        ("k8s", "gcr", "io"),
        ("registry", "k8s", "io"),
        ("mcr", "microsoft", "com"),
        ("public", "ecr", "aws"),
        ("nvcr", "io"),
        ("conda", "anaconda", "org"),
        ("deb", "debian", "org"),
    )
)
REGISTRY = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, REGISTRIES))})(?![\w-])", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:{})/".format("|".join(("work", "root"))))

MODULE_LINES = 500
FUNCTION_LINES = 60
# Path, or path and function, of what is better whole. Each with its reason.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def repository_files(root: Path = ROOT) -> Iterator[Path]:
    """Every file that belongs to the repository, without asking git, which need not be installed."""
    left_out = {"__pycache__", "build", "dist", "out"}
    for entry in sorted(root.iterdir()):
        hidden = entry.name.startswith(".") and entry.name not in {".ci", ".github", ".gitignore"}
        if hidden or entry.name in left_out or entry.name.endswith(".egg-info"):
            continue
        if entry.is_dir():
            yield from repository_files(entry)
        else:
            yield entry


def hits(pattern: re.Pattern[str], root: Path = ROOT) -> list[str]:
    found = []
    for file in repository_files(root):
        text = file.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{file.relative_to(root)}:{number}: {match.group()}")
    return found


def product_modules() -> list[Path]:
    return [
        file
        for file in repository_files(ROOT / "epp")
        if file.suffix == ".py" and GENERATED not in file.parents
    ]


def long_functions(source: str) -> list[tuple[str, int]]:
    """Functions of a module that are longer than the guide, as name and length, docstring included."""
    functions = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = ((node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions)
    return [(name, length) for name, length in lengths if length > FUNCTION_LINES]


def test_nothing_at_the_top_shadows_the_standard_library() -> None:
    assert not list((ROOT / "operator").glob("*.py"))
    assert not [entry.name for entry in ROOT.glob("*.py") if entry.stem in sys.stdlib_module_names]


def test_standard_operator_module_is_importable_from_the_root() -> None:
    # Without -S a hook in site-packages may have loaded the real module first and hide the fault.
    program = "import operator, collections; operator.itemgetter; print(operator.__file__)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).parent == Path(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize("folder", ["tests", "e2e"])
def test_tests_are_no_packages(folder: str) -> None:
    assert not [str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("__init__.py")]
    assert not (ROOT / folder / "operator").exists()


def test_test_files_have_unique_names() -> None:
    names = [file.name for folder in ("tests", "e2e") for file in (ROOT / folder).rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    modules = {file.stem for file in product_modules()} - {"__init__", "__main__"}
    assert modules & {"operator", "queue", "types", "logging", "signal", "select", "token", "sched"} == set()


def test_no_file_names_a_registry() -> None:
    assert hits(REGISTRY) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert hits(MACHINE_PATH) == []


@pytest.mark.parametrize("index", range(len(REGISTRIES)))
def test_registry_guard_sees_each_name(index: int, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "values.yaml").write_text(f"a: 1\nimage: eu.{REGISTRIES[index]}/team/image:1\n")
    assert [hit.split(": ")[0] for hit in hits(REGISTRY, tmp_path)] == ["deep/values.yaml:2"]


def test_guards_let_ordinary_text_pass(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("framework/work/x, the root / leaf, example.org, https://host/work/item\n")
    assert hits(REGISTRY, tmp_path) + hits(MACHINE_PATH, tmp_path) == []
    (tmp_path / "b.md").write_text("see /{}/main\n".format("work"))
    assert len(hits(MACHINE_PATH, tmp_path)) == 1


def test_modules_are_short() -> None:
    long = {}
    for file in product_modules():
        name = str(file.relative_to(ROOT))
        lines = len(file.read_text().splitlines())
        if lines > MODULE_LINES and name not in LONG_MODULES:
            long[name] = lines
    assert long == {}


def test_functions_are_short() -> None:
    long = {}
    for file in product_modules():
        for function, lines in long_functions(file.read_text()):
            name = f"{file.relative_to(ROOT)}:{function}"
            if name not in LONG_FUNCTIONS:
                long[name] = lines
    assert long == {}


def test_function_guard_counts_lines() -> None:
    body = "\n".join(["    x = 1"] * FUNCTION_LINES)
    assert long_functions(f"def short():\n{body[10:]}") == []
    assert long_functions(f"class A:\n  async def long():\n{body}") == [("long", FUNCTION_LINES + 1)]
