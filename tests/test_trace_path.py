"""How many files a put, a claim and an acknowledgement pass through, and that the tracer counts them."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "trace_path.py"

# The most hand-written files of client and service, with a data directory, that an operation may execute.
MOST = {"put": 35, "put-consumed": 37, "claim": 30, "get": 22, "ack": 22}

# What surely is on each path, so that a tracer that sees nothing fails: files, and directories that have one.
EXPECTED = {
    "put": ("state/partition.py", "state/table.py", "durable/", "storage/engine.py", "wire/columns.py", "client/"),
    "put-consumed": ("state/partition.py", "state/ledger.py", "durable/"),
    "claim": ("serving/catalog.py", "planning/", "samplers/by_order.py", "durable/"),
    "get": ("dataplane/driver.py", "storage/engine.py", "client/reads.py"),
    "ack": ("serving/catalog.py", "state/ledger.py", "durable/", "server/controller_servicer.py"),
}


def traced(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def files_by_operation(output: str) -> dict[str, set[str]]:
    _, *blocks = output.split("\n\n")
    return {
        operation: {line.strip() for line in lines} for operation, *lines in (block.splitlines() for block in blocks)
    }


def test_no_path_is_longer_than_it_may_be() -> None:
    done = traced("--files", "--most", *(f"{operation}={most}" for operation, most in MOST.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    found = files_by_operation(done.stdout)
    assert found.keys() == MOST.keys() == EXPECTED.keys()
    for operation, expected in EXPECTED.items():
        for path in expected:
            assert any(file.startswith(path) for file in found[operation]), (operation, path)
    assert all("server/app.py" not in files for files in found.values())  # it ran before, and loads everything
    assert [operation for operation in found if "samplers/by_order.py" in found[operation]] == ["claim"]


PATHS = {"put": ["state/a.py", "state/b.py", "client/c.py", "v1/d_pb2.py"], "ack": ["state/a.py"]}


def test_a_path_that_is_too_long_is_named(trace_path: Any) -> None:
    assert trace_path.too_long(PATHS, [("put", 2), ("ack", 1)]) == ["put: 3 files, expected at most 2"]
    assert trace_path.too_long(PATHS, [("put", 3), ("ack", 1)]) == []


def test_a_path_that_is_too_long_fails(
    trace_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def trace(directory: Path) -> dict[str, list[str]]:
        return PATHS

    monkeypatch.setattr(trace_path, "trace", trace)
    for most, code in (("put=2", 1), ("put=3", 0)):
        monkeypatch.setattr(sys, "argv", ["trace_path.py", "--most", most, "ack=1"])
        assert trace_path.main() == code
        assert capsys.readouterr().err.startswith("put: 3 files") is bool(code)


def test_a_limit_for_nothing_is_refused(trace_path: Any) -> None:
    for limit in ("puts=3", "put", "put=many", "put=-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=repr(limit)):
            trace_path.limit(limit)
    assert trace_path.limit("put=3") == ("put", 3)


@pytest.fixture
def trace_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with a directory of the test for the package that it observes."""
    spec = importlib.util.spec_from_file_location("trace_path", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    return module


@pytest.fixture
def recorder(trace_path: Any) -> Iterator[Any]:
    before = sys.getprofile()
    recorder = trace_path.Recorder()
    yield recorder
    recorder.close()
    sys.setprofile(before)


def load(path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where a dataclass looks for the module that it is of
    spec.loader.exec_module(module)
    return module


def test_bodies_of_modules_and_classes_do_not_count(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.start()
    load(tmp_path / "state" / "traced_a.py", "x = 1\nclass Rows:\n    y = 2\n    def f(self): pass\n", monkeypatch)
    assert recorder.stop() == set()


def test_functions_of_all_threads_and_generated_methods_count_while_it_records(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "traced_a": "def f(): pass",
        "traced_b": "async def f(): pass",
        "traced_c": "from dataclasses import dataclass\n@dataclass\nclass Row:\n    x: int\n",
        "traced_d": "def f(): yield\n",
        "traced_e": "def f(): pass",
    }
    modules = {name: load(tmp_path / "state" / f"{name}.py", source, monkeypatch) for name, source in sources.items()}
    modules["traced_e"].f()
    recorder.start()
    thread = threading.Thread(target=modules["traced_a"].f)
    thread.start()
    thread.join()
    with pytest.raises(StopIteration):
        modules["traced_b"].f().send(None)
    modules["traced_c"].Row(1)
    list(modules["traced_d"].f())
    assert recorder.stop() == {f"state/traced_{letter}.py" for letter in "abcd"}
    modules["traced_e"].f()
    recorder.start()
    assert recorder.stop() == set()
