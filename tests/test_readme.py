"""README.md: its programs run against a service; and what it and the other pages link to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tq_service.testing import ServiceProcess

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DEFAULT_ADDRESS = "localhost:50051"
PAGES = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]


def test_the_programs_run() -> None:
    """Blocks marked `python` are programs; those marked `py` are parts of one."""
    programs = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert programs
    with ServiceProcess() as server:
        for program in programs:
            run = subprocess.run(
                [sys.executable, "-c", program.replace(DEFAULT_ADDRESS, server.address)],
                env={**os.environ, "TQ_ADDRESS": server.address},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert run.returncode == 0, run.stderr


def test_parts_of_programs_are_python() -> None:
    parts = re.findall(r"^```py\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert parts
    for part in parts:
        compile(part, "README.md", "exec")


def headings(page: str) -> set[str]:
    """Return the anchors of a page, made of its headings as GitHub does."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_what_a_page_links_to_is_there(path: Path) -> None:
    page = (ROOT / path).read_text()
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page):
        target = ROOT / path.parent / link if link else ROOT / path
        assert target.exists(), link
        assert not anchor or anchor in headings(target.read_text()), f"{link}#{anchor}"


def test_the_verbs_it_names_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert verbs
    assert [verb for verb in sorted(verbs) if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []
