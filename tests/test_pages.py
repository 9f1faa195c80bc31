"""README.md, CHANGELOG.md and docs: their links have targets, and the commands and names that they offer exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

import tq_service as tq
from tq_service.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


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


def test_links_of_pages_have_targets() -> None:
    assert [f"{path.relative_to(ROOT)}: {link}" for path in PAGES for link in broken_links(path)] == []


def broken_links(path: Path) -> list[str]:
    broken = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        target = path.parent / link if link else path
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            broken.append(f"{link}#{anchor}")
    return broken


def test_files_that_pages_name_exist() -> None:
    pages = [path for path in PAGES if path.parent.name != "adr"]  # which may name what is gone
    named = {
        name
        for path in pages
        for name in re.findall(
            r"`((?:tests|scripts|benchmarks|examples|chaos|tq_service)/[\w/.-]+\.\w+)`", path.read_text()
        )
    }
    assert "tests/e2e/test_e2e_durable.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_verbs_it_names_are_in_the_makefile() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    verbs = {verb for page in PAGES for verb in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"test", "nightly", "demo"} <= verbs
    assert verbs <= set(" ".join(rules).split())


# Code of a page: blocks, with continued lines joined, and spans, which may be broken over two lines.
CODE = re.compile(r"^ *```\w*\n(.*?)^ *```$|`([^`]+)`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?<![=\w/.-])tq-service((?: +(?!#)[^\s|;&>)]+)*)")
NAME = re.compile(r"(?<![\w.:/-])tq(?!\.example)((?:\.[A-Za-z_]\w*)+)(?!\.?[\w-])")


def code_of(page: str) -> list[str]:
    """Return the lines of the blocks and the spans of a page."""
    lines = []
    for block, span in CODE.findall(page):
        lines += block.replace("\\\n", " ").splitlines() if block else [" ".join(span.split())]
    return lines


def commands_of(page: str) -> list[list[str]]:
    """Return the words after each `tq-service`, but of lines where that names something to helm."""
    lines = [line for line in code_of(page) if not re.search(r"\bhelm ", line)]
    return [words.split() for line in lines for words in COMMAND.findall(line)]


def names_of(page: str) -> list[str]:
    return [name for line in code_of(page) for name in NAME.findall(line)]


def wrong_command(words: list[str]) -> str:
    """Return what `tq-service` does not take of the words after it, or an empty text."""
    command, context = typer.main.get_command(app), None
    for number, word in enumerate(words):
        context = command.make_context("tq-service", [], parent=context, resilient_parsing=True)
        if not hasattr(command, "list_commands"):
            break
        if not re.fullmatch(r"[a-z][a-z-]*", word):  # an option of the group, or any command
            return wrong_options(command, words[number:])
        command = command.get_command(context, word)
        if command is None:
            return word
    return wrong_options(command, words)


def wrong_options(command: Any, words: list[str]) -> str:
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = [option for word in words for option in re.findall(r"^\[?(--[a-z][a-z-]*)", word)]
    return " ".join(option for option in given if option not in known | {"--help"})


def has_name(names: str) -> bool:
    found: Any = tq
    for name in names.split(".")[1:]:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_files_of_the_package_that_decisions_name_exist() -> None:
    """As the end of a path, such as `server/app.py`; what a replaced decision names may be gone."""
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("*/**/*.py") if not path.is_relative_to(ROOT / ".venv")]
    named = {
        (page.name, name)
        for page in ROOT.glob("docs/adr/*.md")
        if "\nReplaced by" not in (text := page.read_text())
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`(?! of )", text)  # of a commit, or of another project
    }
    assert ("0022-storage-has-two-layers.md", "blobs/memory.py") in named
    assert [one for one in sorted(named) if not any(file.endswith(f"/{one[1]}") for file in files)] == []


def test_commands_of_pages_exist() -> None:
    commands = [(path.relative_to(ROOT), words) for path in PAGES for words in commands_of(path.read_text())]
    assert len(commands) > 50
    assert [
        f"{path}: tq-service {' '.join(words)} has no {wrong}"
        for path, words in commands
        if (wrong := wrong_command(words))
    ] == []


def test_names_of_pages_exist() -> None:
    names = [(path.relative_to(ROOT), name) for path in PAGES for name in names_of(path.read_text())]
    assert len(names) > 20
    assert [f"{path}: tq{name}" for path, name in names if not has_name(name)] == []


def test_commands_and_names_that_do_not_exist_are_found() -> None:
    page = (
        "`tq-service\nsamplers`, `tq.Client`, `tq.None`\n```sh\ntq-service partition \\\n  peek train --many 3\n```\n"
    )
    assert [wrong_command(words) for words in commands_of(page)] == ["samplers", "--many"]
    assert [name for name in names_of(page) if not has_name(name)] == [".None"]
