"""The site of the documentation builds without a warning, has every public name, and answers its readers' words."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tq_service as tq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import site_hooks  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # on a busy machine; a quiet one takes 25 s

# What a reader types -> the section whose title has all of its words, and a link there to the answer.
QUESTIONS = "troubleshooting.html#"
PHRASES = {
    "my trainer hangs": (f"{QUESTIONS}my-trainer-hangs", "#a-trainer-or-worker-waits-and-gets-nothing"),
    "the loader ended early": (f"{QUESTIONS}the-loader-ended-early", "#the-loader-ends-early-or-delivers-nothing"),
    "ranks disagree": (f"{QUESTIONS}ranks-disagree", None),
    "quota exceeded": (f"{QUESTIONS}quota-exceeded", "#a-put-is-rejected-or-waits"),
    "memory grows": (f"{QUESTIONS}data-is-lost-or-memory-grows", None),
    "resume with other ranks": ("tutorials/resume.html", None),
    "how stale are my samples": (f"{QUESTIONS}how-stale-are-my-samples", "tutorials/staleness.html#trainer"),
    "two runs at once": (f"{QUESTIONS}two-runs-at-once", "concepts/partitions.html#namespaces"),
    "GPU tensors": (f"{QUESTIONS}gpu-tensors", "data_loading.html#batches-on-a-gpu"),
    "where do bytes go": (f"{QUESTIONS}where-do-bytes-go", "deployment/data_paths.html#data-placement"),
    "which port must be open": (f"{QUESTIONS}which-port-must-be-open", "deployment/data_paths.html#the-bulk-port"),
    "how do I use it with verl": (f"{QUESTIONS}how-do-i-use-it-with-verl", "integrations/verl.html"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return place


@pytest.fixture(scope="module")
def sections(site: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    return found


def public_names(package: str) -> set[str]:
    """Return `__all__` of a module, or its classes if it has none, from its source: without an import of torch."""
    path = ROOT / package.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def public_members(value: type) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 100
    elsewhere = re.compile(
        r"<(?:script|img|iframe|link|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//"
        r"|(?:url\(|@import )[\"']?(?:https?:)?//"
    )
    assert [str(page.relative_to(site)) for page in pages if elsewhere.search(page.read_text())] == []


def test_the_reference_has_every_public_name(sections: list[dict[str, Any]]) -> None:
    documented = {section["location"].partition("#")[2] for section in sections}
    # A name of two modules needs one entry: both are the same class. `errors`, `samplers` and `types` are modules.
    found = {name.rpartition(".")[2] for name in documented if name.startswith("tq_service.")} | {
        "errors",
        "samplers",
        "types",
    }
    assert public_names("tq_service") | public_names("tq_service.client") <= found
    for module in ("types", "errors", "results", "data", "samplers", "balancing", "testing"):
        assert public_names(f"tq_service.{module}") - found == set()
    assert {f"tq_service.Client.{name}" for name in public_members(tq.Client)} - documented == set()


@pytest.mark.parametrize("phrase", PHRASES)
def test_search_finds_the_answer_by_the_words_of_a_reader(
    site: Path, sections: list[dict[str, Any]], phrase: str
) -> None:
    """The search weighs words of titles a thousand times those of texts, and sections with all words above others."""
    location, answer = PHRASES[phrase]
    words = set(phrase.lower().split())
    titles = {section["location"]: set(re.findall(r"\w+", section["title"].lower())) for section in sections}
    assert words <= titles[location]
    if answer is not None:
        page, _, anchor = location.partition("#")
        section = (site / page).read_text().partition(f'id="{anchor}"')[2].partition("<h3")[0]
        assert f'href="{answer}"' in section


def test_a_link_out_of_the_documentation_leads_to_the_file_on_the_site(site: Path) -> None:
    page = (site / "resuming.html").read_text()
    assert 'href="repository/examples/resume_everything.py.html"' in page
    assert "kill -9" in (site / "repository/examples/resume_everything.py.html").read_text()
    assert 'href="../../performance.html"' in (site / "repository/benchmarks/index.html").read_text()


def test_the_title_has_the_version(site: Path) -> None:
    assert f"tq_service {tq.__version__}</title>" in (site / "concepts" / "index.html").read_text()


def test_lists_of_github_are_those_of_python_markdown() -> None:
    page = (
        "Text\n- one\n  more\n\n  next paragraph\n  ```sh\n  ls\n\n    in\n  ```\n- two\n\n"
        "1. a\n   - b\n     c\n\nEnd\n```\n- no list\n```"
    )
    assert site_hooks.python_markdown_lists(page) == (
        "Text\n\n- one\n    more\n\n    next paragraph\n    ```sh\n    ls\n\n      in\n    ```\n- two\n\n"
        "1. a\n    - b\n        c\n\nEnd\n```\n- no list\n```"
    )
