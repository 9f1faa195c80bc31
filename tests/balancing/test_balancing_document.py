"""docs/balancing.md: its code runs and its pictures are there."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "balancing.md"


def test_the_code_runs():
    blocks = re.findall(r"(<!-- not run -->\n)?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    code = [block for not_run, block in blocks if not not_run]
    assert len(code) == 4
    exec(compile("\n".join(code), "docs/balancing.md", "exec"), {"__name__": "balancing_document"})


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", DOCUMENT.read_text(), re.DOTALL)
    assert len(pictures) == 2
    assert all((DOCUMENT.parent / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
