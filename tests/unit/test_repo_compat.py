"""docs/compatibility.md against the code, the field's names and the tests."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import pytest
import yaml

from epp import names
from epp.config.registry import BUILT_INS, NOT_YET
from epp.config.schema import EndpointPickerConfig
from epp.config.spec import Kind
from epp.extproc.heads import PATH_FALLBACKS
from epp.payload.apis import DIALECTS, PARSERS
from epp.pool.engines import ENGINES, CacheInfo, EngineSpec, MetricSpec
from epp.runtime.flag_values import REFUSED
from epp.runtime.legacy_metrics import TWINS
from epp.runtime.metrics_table import TABLE
from epp.runtime.options import FlagSpec, flags
from epp.scheduling.agents import AGENT_SESSION_HEADERS
from epp.scheduling.filters import TEST_ENDPOINT_SELECTION
from epp.scheduling.handlers import DEFAULT_PROFILE_HEADER
from epp.scheduling.sessions import EncodedEndpointHeaderConfig, SessionIdConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
FIELD = yaml.safe_load((ROOT / "tests" / "data" / "compat" / "field.yaml").read_text())
TEST = re.compile(r"`([\w.]+\.py)::(\w+)`")
CODE = re.compile(r"`([^`]+)`")

SUPPORTED, DIFFERENT, NOT_THERE = "supported", "different on purpose", "not yet"
OURS, NO_EFFECT, REFUSES, PASSES = "ours", "no effect", "refused", "passes"
HERE = {SUPPORTED, DIFFERENT}

CASES = (
    "Refusals",
    "How pages are read",
    "Defaults and rules",
    "Whole requests",
    "The ext-proc stream",
    "gRPC",
    "gRPC of Vertex AI",
    "Choosing an endpoint",
    "Pool, sessions, configuration",
)
DIFFERENCES = (
    "Requests",
    "Answers",
    "Refusals and faults",
    "Choosing",
    "Engines and the pool",
    "Process and metrics",
)
PLUGINS = (
    "Filters",
    "Scorers",
    "Pickers, profile handlers, deciders",
    "Data producers",
    "Flow control, admission, hooks",
    "Data sources, extractors, discovery",
    "Parsers",
)
APIS, SERIES, FLAGS, ENVIRONMENT = "Request APIs", "Series", "Flags of `warmroute serve`", "Environment"
HEADERS, METADATA, REASONS = "Headers", "Dynamic metadata", "Reasons"
METRICS, FIELDS = "Names", "Fields"
NAMED = (*PLUGINS, APIS, SERIES, FLAGS, ENVIRONMENT, HEADERS, METADATA, REASONS, METRICS, FIELDS)


class Row(NamedTuple):
    """One row of a table. `names`: what stands between backticks in its first cell."""

    section: str
    cells: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return CODE.findall(self.cells[0])

    @property
    def state(self) -> str:
        found = [cell for cell in self.cells[1:] if cell in STATES]
        return found[0] if len(found) == 1 else ""

    @property
    def note(self) -> str:
        return self.cells[-1]

    @property
    def title(self) -> str:
        return f"{self.section}: {self.cells[0]}"


STATES = {SUPPORTED, DIFFERENT, NOT_THERE, OURS, NO_EFFECT, REFUSES, PASSES}


def sections(page: str) -> dict[str, list[Row]]:
    """The tables of the page by their headings, without their first rows."""
    found: dict[str, list[Row]] = {}
    for part in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        cells = [tuple(cell.strip() for cell in line.strip()[1:-1].split("|")) for line in lines]
        if cells:
            assert title not in found, f"two tables under {title}"
            found[title] = [Row(title, row) for row in cells[1:]]
    return found


def rows_of(page: str, *titles: str) -> list[Row]:
    found = sections(page)
    return list(chain.from_iterable(found.get(title, ()) for title in titles))


def by_name(page: str, *titles: str) -> dict[str, Row]:
    return {name: row for row in rows_of(page, *titles) for name in row.names}


# -- every row ----------------------------------------------------------------------------------------


def problems(page: str, files: dict[str, str]) -> list[str]:
    """What is wrong with states, notes and named tests. `files`: text of each test file by its name."""
    found = []
    for row in rows_of(page, *CASES, *NAMED):
        if not row.state:
            found.append(f"{row.title}: no state")
        if (row.state == NOT_THERE) != row.note.startswith("Waits for "):
            found.append(f"{row.title}: not yet, and what it waits for, go together")
        if row.state == DIFFERENT and not row.note:
            found.append(f"{row.title}: does not say what is different")
    tested = [row for row in rows_of(page, *CASES) if row.state != NOT_THERE]
    tested += rows_of(page, *DIFFERENCES)
    found += [f"{row.title}: no test" for row in tested if not TEST.findall(row.note)]
    for title in NAMED:
        counts = Counter(chain.from_iterable(_identities(row) for row in rows_of(page, title)))
        found += [f"{title}: {name} is there {count} times" for name, count in counts.items() if count > 1]
    for file, name in TEST.findall(page):
        if not re.search(rf"^(async )?def {name}\(", files.get(file, ""), re.MULTILINE):
            found.append(f"no test {file}::{name}")
    return found


def _identities(row: Row) -> list[str]:
    return [" ".join(row.names)] if row.section == METADATA else row.names


def files_of_tests() -> dict[str, str]:
    return {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def missing(title: str, wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    """Names without a row, and rows of names that do not exist."""
    wanted, there = set(wanted), set(there)
    lost = [f"{title}: {name} has no row" for name in sorted(wanted - there)]
    return lost + [f"{title}: there is no {name}" for name in sorted(there - wanted)]


def wrong(rows: dict[str, Row], right: dict[str, set[str]]) -> list[str]:
    return [
        f"{rows[name].section}: {name} is {rows[name].state!r}, not {' or '.join(sorted(states))}"
        for name, states in right.items()
        if name in rows and rows[name].state not in states
    ]


# -- plugins and APIs ---------------------------------------------------------------------------------


def plugin_problems(page: str) -> list[str]:
    """Each type once, with its state; parameters that are refused are named in its row."""
    rows = by_name(page, *PLUGINS)
    known = {spec.type for spec in BUILT_INS} | {known.type for known in NOT_YET}
    found = missing("plugins", known | set(chain(*FIELD["plugins"])), rows)
    right = {spec.type: HERE for spec in BUILT_INS} | {known.type: {NOT_THERE} for known in NOT_YET}
    found += wrong(rows, right)
    counts = Counter(chain.from_iterable(row.names for row in rows_of(page, *PLUGINS)))
    found += [f"plugins: {name} is there {count} times" for name, count in counts.items() if count > 1]
    for each in (*BUILT_INS, *NOT_YET):
        if each.replaced_by and each.type in rows and "deprecated" not in rows[each.type].note:
            found.append(f"plugins: {each.type} does not say that it is deprecated")
    for spec in BUILT_INS:
        refused = set(refused_parameters(spec.params))
        if spec.replaced_by is None and spec.type in rows:
            told = set(CODE.findall(rows[spec.type].note))
            found += [f"plugins: {spec.type} refuses {name}" for name in sorted(refused - told)]
    return found


def refused_parameters(kind: Any) -> Iterator[str]:
    """Parameters of the field that structs know and do not take yet."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from getattr(kind, "later", ())
        for field in msgspec.structs.fields(kind):
            yield from refused_parameters(field.type)
    for inner in get_args(kind):
        yield from refused_parameters(inner)


def api_problems(page: str) -> list[str]:
    """Each path of each parser."""
    rows = {(row.names[0], CODE.findall(row.cells[1])[0]): row for row in rows_of(page, APIS)}
    ours = {
        (suffix, parser)
        for parser, read in PARSERS.items()
        for api in read.apis
        for suffix in DIALECTS[api].suffixes
    }
    field = {(path, parser) for parser, paths in FIELD["paths"].items() for path in paths}
    found = missing(APIS, map(" of ".join, ours | field), map(" of ".join, rows))
    found += [f"{row.title}: {row.state}" for row in rows.values() if row.state not in HERE]
    known = {spec.type for spec in BUILT_INS if spec.kind is Kind.PARSER}
    return found + missing("Parsers", known, {row.names[0] for row in rows_of(page, "Parsers")} & known)


# -- headers, metadata, engines -----------------------------------------------------------------------


def header_problems(page: str) -> list[str]:
    """Every header that the code knows or the field has; metadata; reasons."""
    metadata = {" ".join(row.names) for row in rows_of(page, METADATA) if len(row.names) == 2}
    found = missing(METADATA, map(" ".join, FIELD["metadata"]), metadata)
    of_metadata = {key for _, key in FIELD["metadata"]} - {names.DESTINATION_ENDPOINT}
    rows = by_name(page, HEADERS)
    found += missing(HEADERS, (set(chain(*FIELD["headers"])) | known_headers()) - of_metadata, rows)
    field = set(chain(*FIELD["headers"]))
    found += wrong(rows, {name: {OURS} if name not in field else STATES - {OURS} for name in rows})
    reasons = by_name(page, REASONS)
    found += missing(REASONS, chain(*FIELD["reasons"]), reasons)
    given = {names.REJECTED_SATURATED, names.REJECTED_NO_ENDPOINTS}
    return found + wrong(reasons, {name: {SUPPORTED} if name in given else {NOT_THERE} for name in reasons})


def known_headers() -> set[str]:
    values = [value for name, value in vars(names).items() if name.isupper() and not isinstance(value, int)]
    told = chain.from_iterable([value] if isinstance(value, str) else value for value in values)
    plugins = (
        *AGENT_SESSION_HEADERS,
        *PATH_FALLBACKS,
        TEST_ENDPOINT_SELECTION,
        "retry-after",
        DEFAULT_PROFILE_HEADER.lower(),
        EncodedEndpointHeaderConfig().header,
        *(source.header for source in SessionIdConfig().sources),
    )
    return {name for name in told if re.match(r"(x|endpoint-load)-", name)} | set(plugins)


def series_problems(page: str) -> list[str]:
    """Every series that is read, under its engine."""
    rows = {(name, CODE.findall(row.cells[1])[0]): row for row in rows_of(page, SERIES) for name in row.names}
    ours = {(series, engine.name) for engine in ENGINES for series in series_of(engine)}
    field = {(series, engine) for engine, listed in FIELD["series"].items() for series in listed}
    found = missing(SERIES, map(" of ".join, ours | field), map(" of ".join, rows))
    for key, row in rows.items():
        if (row.state == OURS) != (key not in field):
            found.append(f"{row.title}: {row.state}")
    return found


def series_of(engine: EngineSpec) -> Iterator[str]:
    for field in engine.__dataclass_fields__:
        value = getattr(engine, field)
        for each in value if isinstance(value, tuple) else (value,):
            metric = each.metric if isinstance(each, CacheInfo) else each
            if isinstance(metric, MetricSpec):
                yield metric.name


# -- flags, metrics, configuration --------------------------------------------------------------------

# A flag without a word of its own in its help that goes with another one.
GOES_WITH = {"--endpoint-target-ports": "--endpoint-selector"}


def flag_problems(page: str) -> list[str]:
    """Every flag of ours and of the field, with the state that its help tells."""
    rows = by_name(page, FLAGS)
    ours = {flag.names[0]: flag for flag in flags()}
    found = missing(FLAGS, {*ours, *REFUSED, *FIELD["flags"]}, rows)
    right = {name: {state_of(flag, ours)} for name, flag in ours.items()}
    right |= {name: {REFUSES} for name in REFUSED}
    found += wrong(rows, right)
    return found + missing(ENVIRONMENT, chain(*FIELD["environment"]), by_name(page, ENVIRONMENT))


def state_of(flag: FlagSpec, ours: dict[str, FlagSpec]) -> str:
    name = flag.names[0]
    said = ours[GOES_WITH[name]].help if name in GOES_WITH else flag.help
    if name not in FIELD["flags"]:
        return OURS
    if said.startswith("Refused:"):
        return REFUSES
    if " yet." in said:
        return NOT_THERE
    if "without effect" in said or "no effect" in said:
        return NO_EFFECT
    default = FIELD["flags"][name]
    same = default is None or default == flag.shown_default
    return SUPPORTED if same and not said.startswith("Accepted for compatibility") else DIFFERENT


def metric_problems(page: str) -> list[str]:
    """Every metric of ours and of the field; every twin of those that are here."""
    rows, ours, field = by_name(page, METRICS), {row.name for row in TABLE}, FIELD["metrics"]
    found = missing(METRICS, {*ours, *field}, rows)
    right = {name: HERE if name in field else {OURS} for name in ours}
    found += wrong(rows, right | {name: {NOT_THERE} for name in field if name not in ours})
    twins = {twin.name: twin.legacy for twin in TWINS}
    wanted = {name: twin for name, twin in field.items() if name in ours and twin}
    return found + missing("twins", map(" of ".join, wanted.items()), map(" of ".join, twins.items()))


def field_problems(page: str) -> list[str]:
    """Every field of the configuration file."""
    return missing(FIELDS, fields_of(EndpointPickerConfig), by_name(page, FIELDS))


def fields_of(struct: Any, path: str = "") -> Iterator[str]:
    hints = get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        inner, listed = inner_struct(hints[field.name])
        here = f"{path}{field.encode_name}"
        if inner is None:
            yield here
        else:
            yield from fields_of(inner, f"{here}[]." if listed else f"{here}.")


def inner_struct(kind: Any) -> tuple[Any, bool]:
    """The struct in a field's type, and whether there are several of it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind, False
    for each in get_args(kind):
        found, listed = inner_struct(each)
        if found is not None:
            return found, listed or get_origin(kind) is tuple
    return None, False


# -- the page -----------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[str], list[str]]] = {
    "rows": lambda page: problems(page, files_of_tests()),
    "plugins": plugin_problems,
    "apis": api_problems,
    "headers": header_problems,
    "series": series_problems,
    "flags": flag_problems,
    "metrics": metric_problems,
    "fields": field_problems,
}


def test_every_table_is_looked_at() -> None:
    found = sections(PAGE.read_text())
    assert set(found) == {"What is the same", *CASES, *DIFFERENCES, *NAMED}
    assert sum(len(found[title]) for title in CASES) > 180


@pytest.mark.parametrize("name", CHECKS)
def test_the_page_is_right(name: str) -> None:
    assert CHECKS[name](PAGE.read_text()) == []


def test_every_compat_case_is_named() -> None:
    named = set(TEST.findall(PAGE.read_text()))
    for file in (
        "test_compat_cases.py",
        "test_compat_plugins.py",
        "test_compat_grpc.py",
        "test_compat_vertex.py",
    ):
        written = re.findall(r"^def (test_\w+)\(", files_of_tests()[file], re.MULTILINE)
        assert [name for name in written if (file, name) not in named] == []


def test_links_lead_somewhere() -> None:
    page = PAGE.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", page):
        file, _, anchor = target.partition("#")
        text = (PAGE.parent / file).read_text() if file else page
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in anchors, target


# -- faults that the checks see -----------------------------------------------------------------------

FAULTS = [
    ("plugins", "| `agent-identity` | supported | |\n", "", "plugins: agent-identity has no row"),
    ("plugins", "`decode-filter`, ", "`decode-filter`, `code-filter`, ", "plugins: there is no code-filter"),
    (
        "plugins",
        "| `slo-headroom-tier-filter` | not yet",
        "| `slo-headroom-tier-filter` | supported",
        "is 'supported', not not",
    ),
    ("plugins", "`max-score-picker`, ", "`max-score-picker`, `queue-scorer`, ", "queue-scorer is there 2"),
    ("plugins", "`range`, `topK`", "`topK`", "endpoint-attribute-filter refuses range"),
    ("plugins", "| deprecated, with a warning |", "| |", "by-label does not say that it is deprecated"),
    (
        "apis",
        "| `embeddings` | `openai-parser` |",
        "| `embeddings` | `vllmhttp-parser` |",
        "embeddings of op",
    ),
    ("headers", "`x-session-affinity`, ", "", "Headers: x-session-affinity has no row"),
    ("headers", "| `evicted`, ", "| ", "Reasons: evicted has no row"),
    ("headers", "| `retry-after` | ours |", "| `retry-after` | supported |", "retry-after is 'supported'"),
    (
        "series",
        "| `sglang:token_usage` | `sglang`",
        "| `sglang:usage` | `sglang`",
        "sglang:token_usage of sg",
    ),
    ("flags", "`--grpc-port`, ", "", "--grpc-port has no row"),
    (
        "flags",
        "| `--enable-pprof` | no effect |",
        "| `--enable-pprof` | supported |",
        "--enable-pprof is 'supp",
    ),
    ("flags", "| `POD_NAME` |", "| `POD` |", "Environment: POD_NAME has no row"),
    ("metrics", "| `info` | supported", "| `info` | not yet", "Names: info is 'not yet', not"),
    ("metrics", "`disaggregatedset_revision_gating_share`", "`gating_share`", "there is no gating_share"),
    ("fields", "`plugins[].name`, ", "", "Fields: plugins[].name has no row"),
    ("fields", "`dataLayer.injectDefaults`", "`dataLayer.inject`", "there is no dataLayer.inject"),
    ("rows", "| Waits for pools of several clusters |", "| |", "go together"),
    ("rows", "::test_no_candidates_get_503`", "::test_nobody`", "no test test_compat_cases.py::test_nobody"),
    ("rows", "| Several picks are one list, in order | passes |", "| Several | maybe |", "no state"),
    ("rows", "| 200ms, not 50ms |", "| |", "does not say what is different"),
    (
        "rows",
        "| 32778 | `test_runtime_metrics.py",
        "| 32778 | `test_runtime",
        "A bucket of 32768 tokens: no test",
    ),
]


@pytest.mark.parametrize(("check", "old", "new", "expected"), FAULTS)
def test_faults_are_caught(check: str, old: str, new: str, expected: str) -> None:
    page = PAGE.read_text()
    assert old in page
    found = CHECKS[check](page.replace(old, new))
    assert any(expected in problem for problem in found), found
