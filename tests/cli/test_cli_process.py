"""What the server process is set up with."""

import asyncio
import gc
import json
import logging
import platform
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tq_service.cli import process
from tq_service.cli.log_lines import AUDIT_LOGGER, configure_logging
from tq_service.cli.process import (
    collect_garbage,
    collect_garbage_rarely,
    keep_freed_memory,
    loop_factory,
    shorten_switch_interval,
)
from tq_service.errors import InvalidArgumentError
from tq_service.server.audit import AuditLine


@pytest.fixture(autouse=True)
def process_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, interval = root.handlers[:], root.level, sys.getswitchinterval()
    audit = logging.getLogger(AUDIT_LOGGER)
    yield
    audit.handlers[:] = []
    audit.setLevel(logging.NOTSET)
    audit.propagate = True
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.setswitchinterval(interval)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_malloc_accepts_the_settings() -> None:
    assert keep_freed_memory()


def test_memory_stays_as_it_is_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert not keep_freed_memory()


def test_other_threads_give_way_sooner() -> None:
    shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_full_collections_are_rare_and_spare_what_was_imported() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        collect_garbage_rarely()
        assert all(now >= before for now, before in zip(gc.get_threshold(), thresholds, strict=True))
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("generation", [0, 1, 2])
async def test_garbage_goes_though_nothing_is_allocated(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_YOUNG_COLLECTION_SECONDS", 0.01)
    monkeypatch.setattr(process, "_FULL_COLLECTION_SECONDS", 0.1)
    was_enabled, gone = gc.isenabled(), asyncio.Event()
    gc.disable()
    cycle = type("Cycle", (), {})()
    cycle.itself, reference = cycle, weakref.ref(cycle, lambda _: gone.set())
    for younger in range(generation):
        gc.collect(younger)  # what is alive then is older afterwards
    del cycle
    collecting = asyncio.create_task(collect_garbage())
    try:
        await gone.wait()
        assert reference() is None
    finally:
        collecting.cancel()
        if was_enabled:
            gc.enable()


def test_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop_factory("off") is None
    uvloop = pytest.importorskip("uvloop")
    assert loop_factory("auto") is loop_factory("on") is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory("auto") is None
    with pytest.raises(InvalidArgumentError, match="uvloop is on but not installed"):
        loop_factory("on")
    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        assert runner.run(asyncio.sleep(0, "ran")) == "ran"


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
