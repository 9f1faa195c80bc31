"""Each error has the metadata that docs/errors.md lists for its reason, wherever it is made, and no other."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tq_service import errors
from tq_service.client import Client
from tq_service.schema import EndCounts
from tq_service.wire.error_table import ERROR_CLASSES, code_of, from_rpc_error, to_status

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tq_service"
ERRORS_PAGE = ROOT / "docs" / "errors.md"
CLASSES = {kind.__name__: kind for kind in ERROR_CLASSES - {errors.TqError}}

# What passes on the metadata of another error, or is given them by its caller.
PASSED_ON = {
    ("client/_async/fetches.py", "UnavailableError"),
    ("client/reads.py", "DataLossError"),
    ("client/transport.py", "UnavailableError"),
    ("data/source.py", "NothingDeliveredError"),
    ("serving/catalog.py", "InvalidArgumentError"),
    ("serving/catalog.py", "LimitExceededError"),
    ("server/rpc/calls.py", "PartitionNotFoundError"),
    ("server/rpc/calls.py", "PermissionDeniedError"),
    ("server/rpc/calls.py", "InternalError"),
    ("server/supervisor.py", "ServiceFailedError"),
}
# Made of a class that is looked up: by bounds of partitions, from codes of gRPC, where a storage service is away, and
# for claims that were lost.
MADE_BY_TABLE = {
    "BatchForgottenError", "ClaimReleasedError", "LeaseExpiredError", "SamplesClearedError",
    "CallCancelledError", "DeadlineError", "QuotaExceededError", "AdmissionLimitError", "UnauthenticatedError",
    "UnavailableError", "InternalError", "InvalidArgumentError",
}  # fmt: skip

SERVICE_LAYERS = ("state", "planning", "machine", "serving", "samplers", "server", "storage", "cluster")
OF_CLUSTER = {"JOURNAL_UNREACHABLE"}  # by a start, and later
OF_RESTORE = {"NEWER_VERSION", "SNAPSHOT_DAMAGED"}  # of checkpoints


@dataclass(frozen=True, kw_only=True)
class Documented:
    """The keys of a reason: those of each error, and those that are there where they are known."""

    always: frozenset[str]
    known: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place where an error is made; `is_open` where its metadata have more keys than can be read there."""

    path: str
    line: int
    kind: type[errors.TqError]
    reason: str
    keys: frozenset[str]
    is_open: bool


def documented() -> dict[str, Documented]:
    """Return the table of the page."""
    table = ERRORS_PAGE.read_text().partition("| reason | in each | where known |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len({reason for reason, _, _ in rows}) == len(rows)
    return {
        reason: Documented(always=frozenset(_names(always)), known=frozenset(_names(known)))
        for reason, always, known in rows
    }


def _names(cell: str) -> list[str]:
    names = [name.strip() for name in cell.split(",") if name.strip()]
    assert all(name[0] == name[-1] == "`" for name in names), cell
    return [name.strip("`") for name in names]


def origins() -> dict[str, set[str]]:
    """Return where each reason comes from, by the page."""
    table = (
        ERRORS_PAGE.read_text().partition("| reason | code | from | when | class | also a |")[2].partition("\n\n")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {reason: set(origin.split(", ")) for reason, _, origin, _, name, _ in rows if name != "`TqError`"}


def sites() -> Iterator[Site]:
    """Find where errors are made."""
    for path in sorted(PACKAGE.rglob("*.py")):
        # What engines of objects raise ends in the mirror, which says what became of a put.
        if {"v1", "internal", "_sync", "objects"} & set(path.relative_to(PACKAGE).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in CLASSES:
                    keys, is_open = _keys_of(node)
                    place = path.relative_to(PACKAGE).as_posix()
                    given = [each.value for each in node.keywords if each.arg == "reason"]
                    reason = ast.literal_eval(given[0]) if given else CLASSES[name].reason
                    yield Site(
                        path=place, line=node.lineno, kind=CLASSES[name], reason=reason, keys=keys, is_open=is_open
                    )


def _keys_of(call: ast.Call) -> tuple[frozenset[str], bool]:
    keys: set[str] = set()
    is_open = False
    for argument in call.keywords:
        if argument.arg == "field":
            keys.add("field")
        elif argument.arg == "metadata":
            for node in ast.walk(argument.value):
                if isinstance(node, ast.Dict):
                    keys.update(key.value for key in node.keys if isinstance(key, ast.Constant))
                    is_open |= not all(isinstance(key, ast.Constant) for key in node.keys)
            is_open |= not isinstance(argument.value, ast.Dict | ast.BinOp)
    return frozenset(keys), is_open


SITES = list(sites())
KEYS = documented()
KINDS = {site.reason: site.kind for site in SITES} | {kind.reason: kind for kind in CLASSES.values()}


def test_each_reason_has_keys() -> None:
    assert KEYS.keys() == KINDS.keys()
    assert [reason for reason, keys in KEYS.items() if not keys.always | keys.known] == []
    assert [reason for reason, keys in KEYS.items() if keys.always & keys.known] == []


def test_the_sites_were_found() -> None:
    assert len(SITES) > 300
    assert {site.kind for site in SITES} | {CLASSES[name] for name in MADE_BY_TABLE} == set(CLASSES.values())


def test_errors_are_made_with_the_keys_of_their_reason() -> None:
    assert [site for site in SITES if not site.is_open and not KEYS[site.reason].always <= site.keys] == []
    assert [site for site in SITES if not site.keys <= KEYS[site.reason].always | KEYS[site.reason].known] == []


def test_each_reason_comes_from_where_the_page_says() -> None:
    said = origins()
    assert said.keys() == KINDS.keys()
    made = {reason: {site.path.split("/")[0] for site in SITES if site.reason == reason} for reason in said}
    by_table = {CLASSES[name].reason for name in MADE_BY_TABLE}
    for reason, origin in said.items():
        of_start = {"durable", "journal", "cluster"} if "start" in origin else set()
        in_service = bool(made[reason] & {*SERVICE_LAYERS, "durable", "journal"} - of_start)
        in_python = bool(made[reason] & {"client", "data"})
        assert origin <= {"service", "Python", "start"}, reason
        assert ("service" in origin) >= in_service, reason
        assert "service" not in origin or in_service or reason in by_table | OF_RESTORE | OF_CLUSTER, reason
        assert ("Python" in origin) >= in_python, reason
        assert "start" not in origin or made[reason] & {"durable", "journal", "server", "cluster", "config.py"}, reason


def test_no_key_is_documented_that_nobody_sets() -> None:
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    named = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg is not None}
    counts = {name for name in errors_of_ends() if name not in {"consumed_count", "kept_count"}}
    of_end = KEYS["NOTHING_DELIVERED"].known
    assert of_end == counts
    passed_on = {kind for _, kind in PASSED_ON}
    for reason, kind in KINDS.items():
        here = frozenset[str]().union(*(site.keys for site in SITES if site.reason == reason))
        unseen = KEYS[reason].always | KEYS[reason].known
        unseen -= here | counts
        assert unseen <= named, reason
        assert not unseen or kind.__name__ in passed_on | MADE_BY_TABLE, (reason, unseen)


def errors_of_ends() -> list[str]:
    """Return the names of the counts of an end."""
    return [field.name for field in dataclasses.fields(EndCounts)]


def test_few_places_pass_on_metadata_that_cannot_be_read_there() -> None:
    assert {(site.path, site.kind.__name__) for site in SITES if site.is_open} == PASSED_ON


# Names of the Python client's methods, and what is given to one by keyword.
OF_PYTHON = re.compile(
    "|".join(
        [rf"\b{name}\b" for name in dir(Client) if "_" in name.strip("_")]
        + [r"\b[a-z_]{3,}=(?![=a-z{])", r"\bset TQ_TOKEN", r"\bPython\b"]
    )
)


def test_what_the_service_says_is_for_clients_in_every_language() -> None:
    found = []
    for path in (path for layer in SERVICE_LAYERS for path in sorted((PACKAGE / layer).rglob("*.py"))):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
        here = path.relative_to(PACKAGE)
        found += [f"{here}:{text.lineno}: {text.value}" for text in texts if OF_PYTHON.search(str(text.value))]
    assert found == []


def test_all_keys_travel() -> None:
    for reason, kind in KINDS.items():
        keys = KEYS[reason]
        facts = {name: f"the {name}" for name in sorted(keys.always | keys.known)}
        error = kind("got 3, expected 4", metadata=facts)
        error.reason = reason
        status = to_status(error, method="Insert")
        back = from_rpc_error(code_of(error), status.message, status)
        assert (type(back), back.reason) == (kind, reason)
        assert back.metadata == {**facts, "method": "Insert"}
        assert error.metadata == facts
