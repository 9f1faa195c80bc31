"""The log lines of a service."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tq_service.cli.log_lines import AUDIT_LOGGER, configure_logging
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.server.audit import AuditLine


@pytest.fixture(autouse=True)
def logging_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    audit = logging.getLogger(AUDIT_LOGGER)
    yield
    audit.handlers[:] = []
    audit.setLevel(logging.NOTSET)
    audit.propagate = True
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    log = logging.getLogger("tq_service.example")
    log.debug("not shown")
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed with %s", "this")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == ("error", "tq_service.example", "failed with this")
    assert "ValueError: bad" in line["exception"]
    assert line["time"].endswith("Z")


def test_text_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "text")
    logging.getLogger("tq_service.example").info("not shown")
    logging.getLogger("tq_service.example").warning("shown")
    assert capsys.readouterr().err.rstrip().endswith("WARNING tq_service.example: shown")


def test_a_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("tq_service.example").exception("storage %s", "x\n2026-01-01 forged \x1b[2J\u2028")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(r"tq_service.example: storage x\n2026-01-01 forged \x1b[2J\u2028")
    assert lines[1].startswith("Traceback")


def test_fields_are_written_as_key_and_value_and_cannot_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    logging.getLogger("tq_service.example").info(
        LogMessage(
            "lost puts", count=3, seconds=0.25, put_id=b"\x01\xff", name='a b=c"\n', path=Path("/x"), left_out=None
        )
    )
    line = capsys.readouterr().err.rstrip("\n")
    assert line.endswith(r'example: lost puts count=3 seconds=0.25 put_id=01ff name="a b=c\"\n" path=/x')


def test_fields_are_members_of_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    logging.getLogger("tq_service.example").info(LogMessage("lost puts", count=3, put_id=b"\x01", level="forged"))
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time")
    assert line == {
        "level": "info", "logger": "tq_service.example", "message": "lost puts", "count": 3, "put_id": "01",
    }  # fmt: skip


@pytest.mark.parametrize("style", ["text", "json"])
def test_audit_lines_have_their_own_form_and_file(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.log"
    configure_logging("error", style, path)
    line = AuditLine(decision="refused", method="/s/M", token="a", reason="no rule\n")
    audit = logging.getLogger(AUDIT_LOGGER)
    audit.info("%s", line, extra={"audit": line})
    path.rename(tmp_path / "audit.log.1")
    audit.info("%s", line, extra={"audit": line})
    assert capsys.readouterr().err == ""
    for each in (path, tmp_path / "audit.log.1"):
        (text,) = each.read_text().splitlines()
        if style == "json":
            shown = json.loads(text)
            assert shown.pop("time").endswith("Z")
            assert shown == {
                "level": "audit",
                "logger": AUDIT_LOGGER,
                "decision": "refused",
                "method": "/s/M",
                "token": "a",
                "reason": "no rule\n",
            }
        else:
            assert text.endswith(r'Z AUDIT   refused method="/s/M" token="a" reason="no rule\n"')
    for handler in audit.handlers:
        handler.close()


def test_an_audit_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the audit file .* cannot be written"):
        configure_logging("info", "text", tmp_path / "none" / "audit.log")
