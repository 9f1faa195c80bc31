"""Waits, leases and deadlines are measured by the monotonic clock: a jump of the system's time must not end them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tq_service"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "v1"]

WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
# Who means a date, not a span: the day on which a token expires, and from when on the groups of a log are timed, with
# which a start has to compare its own time.
MEAN_A_DATE = {
    "cli/token.py",
    "machine/state_machine.py",
    "server/checkpoints.py",
    "server/credential_files.py",
    "server/recording.py",  # when a step was recorded
    "storage/mirror/adoption.py",  # lists of a mirror are named by the second they were written in
    "storage/mirror/writer.py",
}


def wall_clock_lines(path: Path) -> list[int]:
    """Return the lines in which a file reads the wall clock."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in WALL_CLOCK:
                lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            lines += [node.lineno for name in node.names if ("time", name.name) in WALL_CLOCK]
    return lines


def test_the_wall_clock_is_found(tmp_path: Path) -> None:
    path = tmp_path / "reads.py"
    path.write_text(
        "import time\nfrom time import time\nx = time.time()\ny = datetime.datetime.now()\nz = time.monotonic()\n"
    )
    assert wall_clock_lines(path) == [2, 3, 4]


def test_nobody_reads_the_wall_clock_but_for_a_date() -> None:
    lines = {str(path.relative_to(PACKAGE)): wall_clock_lines(path) for path in FILES}
    assert {name for name, found in lines.items() if found} == MEAN_A_DATE
