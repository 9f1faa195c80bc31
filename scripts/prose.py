"""Count the turns of phrase that make our English read as translated, per 1,000 words of directories and files.

    scripts/prose.py                     # table of directories, and the files with most of them
    scripts/prose.py docs/limits.md      # each occurrence in these files
    scripts/prose.py --check             # fail if a directory or a file has too many

It reads docstrings, comments and messages of Python files, pages, comments of protos, and the text of the chart. Tests,
generated code, decisions (`docs/adr`) and results of benchmarks are left out. Packages that we admire have 1.5 to 4.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent
MOST_IN_DIRECTORY: Final = 5.0
MOST_IN_FILE: Final = 10.0
_LEAST_WORDS: Final = 400
"""The rate of a file with fewer words is a matter of chance."""
_LEFT_OUT: Final = re.compile(
    r"tests/|docs/adr/|benchmarks/results/|.*/_sync/|tq_service/(internal/)?v1/|scripts/prose\.py"
)
_CHART: Final = "deploy/helm/"
_MESSAGE_WORDS: Final = 4
"""A string of fewer words is a name, not prose."""

_WRITTEN = {
    "a what-clause": r"what (?:is|was|are|were|it|they|an?|the|has|had|each|comes|came|can|does|did|makes|one|all"
    r"|another|more|no|would|must|may|follows|stands|goes)",
    "where for if or when": r"where (?:it|they|there|that|an?|the|no|one|all|nothing|its|this|each|some|not|only|both)",
    "is no": r"(?:is|are|was|were|knows|has|have|takes) no(?:ne)?(?! (?:longer|more than))",
    "is there": r"(?:is|are|was|were|be) there|that there (?:is|are)",
    "goes on": r"go(?:es)? on",
    "says": r"says|said|say",
    "of its own": r"of (?:its|their|your|his) own|by (?:itself|themselves)",
    "is of": r"(?:is|are) of(?! f\b)",
    "so that": r"so (?:that|many|long|much)",
    "another one": r"another one|the one (?:that|which|of)|one after the other",
    "besides, apart, whole": r"besides?|apart|meanwhile|whole",
    "of which": r"(?:of|in|by|with|for|from|at) which",
    "as it has": r"as (?:errors|it|they|the \w+|its \w+|\w+) (?:has|have|does|do)",
    "a rate without per": r"\d[\d.,]* \w+ a (?:second|sample|call|byte|put|field|minute|key|rank|token)"
    r"|(?:claims|puts|calls|samples|bytes) a second",
}
# A line may end within a turn.
TURNS = {
    name: re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE) for name, pattern in _WRITTEN.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of words and turns of phrase in a file or a directory."""

    words: int
    turns: int

    @property
    def rate(self) -> float:
        """Turns per 1,000 words."""
        return 1000 * self.turns / self.words if self.words else 0.0


def texts_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file as first line number and text; a file without prose yields nothing."""
    if name.endswith(".py"):
        yield from _texts_of_python(source)
    elif name.endswith(".md"):
        yield 1, re.sub(r"^ *```.*?^ *```$", _only_newlines, source, flags=re.DOTALL | re.MULTILINE)
    elif name.endswith(".proto"):
        yield 1, _comments(source, "//")
    elif name.startswith(_CHART):
        yield 1, source if name.endswith("NOTES.txt") else _comments(source, "#")
        yield from ((1, text) for text in re.findall(r'"?description"?: "?([^"\n]+)', source))


def _only_newlines(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")


def _comments(source: str, mark: str) -> str:
    """Return the comments of a file, each at its line."""
    found = [re.search(rf"(?:^|\s){mark}+\s(.*)", line) for line in source.split("\n")]
    return "\n".join(match[1] if match else "" for match in found)


def _texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    comments = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0] - 1] = token.string.lstrip("#")
    yield 1, "\n".join(comments)
    yield from _strings(ast.parse(source))


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    text = ""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    if len(text.split()) >= _MESSAGE_WORDS:
        yield node.lineno, text
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def turns_of(name: str, source: str) -> list[tuple[int, str, str]]:
    """Return each turn of phrase of a file as its line, its kind and the text around it."""
    found = []
    for first, text in texts_of(name, source):
        for kind, turn in TURNS.items():
            for match in turn.finditer(text):
                line = first + text.count("\n", 0, match.start())
                around = text[max(match.start() - 30, 0) : match.end() + 30]
                found.append((line, kind, " ".join(around.split())))
    return sorted(found)


def count(name: str, source: str) -> Counts:
    """Count a file."""
    texts = [text for _, text in texts_of(name, source)]
    turns = sum(len(turn.findall(text)) for text in texts for turn in TURNS.values())
    return Counts(words=sum(len(text.split()) for text in texts), turns=turns)


def files() -> list[str]:
    """Return the files to read, including those not yet committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    return [
        name
        for name in sorted(set(listed))
        if (name.endswith((".py", ".md", ".proto")) or name.startswith(_CHART))
        and not _LEFT_OUT.match(name)
        and (ROOT / name).is_file()
    ]


def directory_of(name: str) -> str:
    """Return the directory for which a file counts: a layer of the package, or a directory of the root."""
    parts = Path(name).parts[:-1]
    return "/".join(parts[: 2 if name.startswith("tq_service/") else 1]) or "."


def by_directory(counts: dict[str, Counts]) -> dict[str, Counts]:
    """Add up the files of each directory."""
    found: dict[str, Counts] = {}
    for name, each in counts.items():
        before = found.get(directory_of(name), Counts(words=0, turns=0))
        found[directory_of(name)] = Counts(words=before.words + each.words, turns=before.turns + each.turns)
    return found


def too_many(counts: dict[str, Counts]) -> list[str]:
    """Return a line for each directory, and each file of some length, that has too many turns of phrase."""
    files = {name: each for name, each in counts.items() if each.words >= _LEAST_WORDS}
    return [
        f"{name} has {each.rate:.2f} turns of phrase per 1,000 words; expected at most {most:g}"
        for found, most in ((by_directory(counts), MOST_IN_DIRECTORY), (files, MOST_IN_FILE))
        for name, each in found.items()
        if each.rate > most
    ]


def report(counts: dict[str, Counts], most: int) -> str:
    """Return the table of directories, and the files with most turns."""
    lines = [f"{'words':>8} {'turns':>6} {'per 1,000':>9}"]
    for name, each in sorted(by_directory(counts).items()):
        lines.append(f"{each.words:8,} {each.turns:6} {each.rate:9.1f} {name}")
    lines.append("")
    for name, each in sorted(counts.items(), key=lambda item: -item[1].turns)[:most]:
        lines.append(f"{each.words:8,} {each.turns:6} {each.rate:9.1f} {name}")
    return "\n".join(lines)


def main() -> int:
    """Report or check; return 1 if a directory or a file has too many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a directory or a file has too many")
    parser.add_argument("--most", type=int, default=30, metavar="N", help="files to list [default: 30]")
    parser.add_argument("file", nargs="*", help="show each occurrence in these files")
    given = parser.parse_args()
    for name in given.file:
        for line, kind, text in turns_of(name, Path(name).read_text()):
            print(f"{name}:{line}: {kind}: {text}")
    if given.file:
        return 0
    counts = {name: count(name, (ROOT / name).read_text()) for name in files()}
    if not given.check:
        print(report(counts, given.most))
        return 0
    wrong = too_many(counts)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("Rewrite these phrases; `scripts/prose.py FILE` shows those of a file.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
