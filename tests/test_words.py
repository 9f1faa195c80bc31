"""Words and identifiers that were replaced by the field's: none comes back, in code, help, logs, protos or docs.

The decisions in docs/adr keep the words of their time, and results of benchmarks are records.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXEMPT = (
    "docs/adr/",
    "docs/images/",
    "tests/compatibility/releases/",
    "benchmarks/results/",
    "CHANGELOG.md",
    "tests/test_words.py",
)

# What is gone, as a regular expression for whole words, and parts of identifiers, in any case -> what is said instead.
REPLACED = {
    r"door|doors|entrance|gate_?keeper": "auth, authentication, authorization",
    r"hand_?overs?": "shared memory, wake-up",
    r"parcels?|deposited|deposits": "pending file descriptors",
    r"lend|lends": "lease",
    r"keeper|keeps_?state|state_?keeper": "state store",
    r"set_?aside(_count)?|set aside": "dead-lettered",
    r"run_?ahead|run ahead": "staleness limit",
    r"thaw|thaws|freeze_?partition": "restore, snapshot",
    r"taken back": "released, revoked",
    r"folders?": "directory",
    r"evened out|even shares": "balanced",
    r"dice": "rng",
    r"strikes?|struck": "fault",
    r"crews?": "process group",
    r"findings": "report",
    r"verdicts?": "result, outcome",
    r"tally": "stats",
    r"way_?of_?asking": "claim spec",
    r"looked after": "served",
    r"asleep": "lazy",
    r"doubtful": "orphan",
    r"after_?math": "background calls",
    r"(?<!auth_)tokens_file|--tokens-file": "auth_tokens_file",
    r"make_door": "make_credentials",
    r"is_quick": "runs_inline",
}
ALLOWED = {  # exact phrases with another meaning
    "tally strokes",
    "findings(",  # tests/test_no_pickle.py: those of a linter
}


def texts() -> list[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    found = []
    for name in names:
        if name and not name.startswith(EXEMPT) and (ROOT / name).is_file():
            try:
                found.append((name, (ROOT / name).read_text()))
            except UnicodeDecodeError:  # a picture
                continue
    assert len(found) > 500
    return found


def test_replaced_words_are_gone() -> None:
    given = texts()
    assert [
        f"{line} (write {instead!r})" for pattern, instead in REPLACED.items() for line in lines_with(pattern, given)
    ] == []


def test_a_replaced_word_is_found() -> None:
    assert lines_with("doors?", [("one.md", "A list.\nIts Door is open.\nOutdoors.")]) == [
        "one.md:2: Its Door is open."
    ]


def lines_with(pattern: str, given: list[tuple[str, str]]) -> list[str]:
    word = re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.IGNORECASE)
    found = []
    for name, text in given:
        if not word.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            rest = line
            for phrase in ALLOWED:
                rest = rest.replace(phrase, "")
            if word.search(rest):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    return found
