"""`scripts/prose.py`: the texts that it reads, the turns of phrase that it finds, and its bounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> Any:
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


EXAMPLES = {
    "a what-clause": "It returns what is stored.",
    "where for if or when": "None where it is unknown.",
    "is no": "The name is no text.",
    "is there": "The samples that are there.",
    "goes on": "The service goes on.",
    "says": "The error says why.",
    "of its own": "It has a thread of its own.",
    "is of": "The column is of float32.",
    "so that": "It waits so that a rank can read.",
    "another one": "It asks another one.",
    "besides, apart, whole": "The whole file is read.",
    "of which": "Two puts, of which one is lost.",
    "as it has": "A name as errors have it.",
    "a rate without per": "It takes 8 bytes a sample.",
}


def test_each_turn_of_phrase_is_found(prose: Any) -> None:
    assert EXAMPLES.keys() == prose.TURNS.keys()
    for kind, text in EXAMPLES.items():
        assert [found for _, found, _ in prose.turns_of("a.md", text)] == [kind]
        broken = text.replace(" ", "\n")
        assert [found for _, found, _ in prose.turns_of("a.md", broken)] == [kind]


def test_plain_english_has_none(prose: Any) -> None:
    text = "The service stores samples. If a claim waits, `explain` shows its reason. It takes 8 bytes per sample."
    assert prose.turns_of("a.md", text) == []
    assert prose.count("a.md", text) == prose.Counts(words=18, turns=0)


PYTHON = '''"""Store what is given."""

where_it = 3  # where it ends
names = ["goes on", "is no"]


def store(value):
    """Return it.

    The store goes on.
    """
    raise ValueError(f"the value {value!r} is no number")
'''


def test_docstrings_comments_and_messages_of_python_are_read(prose: Any) -> None:
    assert [(line, kind) for line, kind, _ in prose.turns_of("a.py", PYTHON)] == [
        (1, "a what-clause"),
        (3, "where for if or when"),
        (10, "goes on"),
        (12, "is no"),
    ]


def test_pages_are_read_without_their_blocks_of_code(prose: Any) -> None:
    page = "# Title\n\n```sh\necho what is left\n```\n\nThe page goes on.\n"
    assert prose.turns_of("docs/a.md", page) == [(7, "goes on", "# Title The page goes on.")]


def test_comments_of_protos_are_read(prose: Any) -> None:
    source = "// Return what is stored.\nmessage A {\n  string goes_on = 1;  // so that it is found\n}\n"
    assert [(line, kind) for line, kind, _ in prose.turns_of("protos/a.proto", source)] == [
        (1, "a what-clause"),
        (3, "so that"),
    ]


def test_texts_of_the_chart_are_read(prose: Any) -> None:
    values = "# What is stored.\nimage: what-is\nport: 1  # so that it listens\n"
    assert len(prose.turns_of("deploy/helm/c/values.yaml", values)) == 2
    assert len(prose.turns_of("deploy/helm/c/templates/NOTES.txt", "It goes on.\n")) == 1
    assert len(prose.turns_of("deploy/helm/c/Chart.yaml", "description: A chart that goes on\n")) == 1
    assert prose.turns_of("deploy/kubernetes/a.yaml", values) == []


def test_the_files_of_the_repository_are_read(prose: Any) -> None:
    files = prose.files()
    assert {"README.md", "docs/limits.md", "tq_service/config.py", "deploy/helm/tq-service/values.yaml"} <= set(files)
    assert not [name for name in files if "_sync/" in name or name.startswith(("tests/", "tq_service/v1/"))]
    assert [prose.directory_of(name) for name in ("README.md", "docs/a/b.md", "tq_service/a.py")] == [
        ".",
        "docs",
        "tq_service",
    ]
    assert prose.directory_of("tq_service/client/_async/a.py") == "tq_service/client"


def test_directories_and_longer_files_have_bounds(prose: Any) -> None:
    counts = {
        "docs/a.md": prose.Counts(words=900, turns=9),
        "docs/b.md": prose.Counts(words=100, turns=1),
        "tq_service/state/a.py": prose.Counts(words=400, turns=5),
        "tq_service/state/b.py": prose.Counts(words=399, turns=0),
        "tq_service/state/c.py": prose.Counts(words=399, turns=0),
        "deploy/short.md": prose.Counts(words=20, turns=1),
        "deploy/long.md": prose.Counts(words=1000, turns=4),
    }
    assert prose.by_directory(counts)["docs"] == prose.Counts(words=1000, turns=10)
    assert prose.too_many(counts) == [
        "docs has 10.00 turns of phrase per 1,000 words; expected at most 5",
        "tq_service/state/a.py has 12.50 turns of phrase per 1,000 words; expected at most 10",
    ]
