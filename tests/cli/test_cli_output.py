"""Tables for people: numbers with separators, nothing of a name taken for markup, and a width of its own in pipes."""

import json

import pytest

from tq_service.cli.options import print_json, show, table
from tq_service.results import ProductionStatus


def test_cells_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("[red]a[/red]", 1_234_567, None), ("b", None, "open")]
    show(iter([rows, table("name, >count, state", rows)]), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["name", "count", "state"],
        ["[red]a[/red]", "1,234,567", "-"],
        ["b", "-", "open"],
    ]
    assert lines[2].index("-") == lines[1].index("7", lines[1].index("1,"))  # numbers end in one column


def test_dataclasses_and_bytes_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        {"id": b"\x01\xff", "status": ProductionStatus(produced_count=1, total_count=2, complete=False)}, indent=None
    )
    out = capsys.readouterr().out
    assert json.loads(out) == {"id": "01ff", "status": {"produced_count": 1, "total_count": 2, "complete": False}}
    assert out.count("\n") == 1
