"""`make check` holds the protos against the image of those accepted last: what breaks clients is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
IMAGE = PROTOS / "accepted.binpb"
BUF = Path(sys.executable).with_name("buf")

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: it comes with the group dev (buf-bin)")


def breaking(protos: Path, against: Path) -> str:
    """Return what buf finds: a line each, nothing where nothing breaks."""
    run = subprocess.run(
        [BUF, "breaking", protos, "--against", against], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode in {0, 100}, run.stderr
    return run.stdout


def test_the_protos_break_nobody_who_was_made_from_the_accepted_ones() -> None:
    assert breaking(PROTOS, IMAGE) == ""


def test_what_was_added_is_accepted_too() -> None:
    """Else it could go again without anybody being told."""
    assert breaking(IMAGE, PROTOS) == "", "added to the protos and not to the image: run `make accept-protos`"


@pytest.mark.parametrize(
    ("accepted", "changed", "finding"),
    [
        ("string task_name = 3;", "string task_name = 333;", 'field "3" with name "task_name"'),
        ("string task_name = 3;", "string task = 3;", 'changed name from "task_name" to "task"'),
        ("int64 batch_size = 5;", "double batch_size = 5;", "changed type"),
        ("BATCH_UNIT_GROUP = 2;", "BATCH_UNIT_GROUP = 9;", 'enum value "2"'),
        ("rpc GetMeta(", "rpc Claim(", 'RPC "GetMeta"'),
    ],
)
def test_a_breaking_change_is_found(tmp_path: Path, accepted: str, changed: str, finding: str) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy)
    controller = copy / "tq_service" / "v1" / "controller_service.proto"
    text = controller.read_text()
    assert accepted in text
    controller.write_text(text.replace(accepted, changed))
    assert finding in breaking(copy, IMAGE)


def test_comments_say_more_than_the_name_again() -> None:
    """Protos are read by those who write clients in other languages: no "The partition.", no line that does not fit."""
    lines = [
        (path.name, number, line)
        for path in PROTOS.rglob("*.proto")
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert len(lines) > 1_000
    assert [place for *place, line in lines if len(line) > 120] == []
    comments = [(*place, line.strip()) for *place, line in lines if line.strip().startswith("// ")]
    assert [
        each for each in comments if re.fullmatch(r"// (The|A|An|Its|Their|Or their) (\w+ )?[\w-]+\.", each[2])
    ] == []
    assert [each for each in comments if "whichever" in each[2]] == []


def test_make_check_asks_for_it() -> None:
    plan = subprocess.run(
        ["make", "--dry-run", "check"], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "buf breaking protos --against protos/accepted.binpb" in plan.stdout
