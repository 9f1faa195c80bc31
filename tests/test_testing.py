"""A service as a process of its own: it is there when the block begins, gone at its end, and says why it is not."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import tq_service as tq
from tq_service.testing import COMMAND, ListeningProcess, ServiceProcess

DOCUMENT = Path(__file__).parents[1] / "docs" / "testing.md"


def program(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


SLEEPS = "print('listening on here:7', flush=True); import time; time.sleep(600)"


def test_it_listens_in_the_block_and_is_gone_after_it() -> None:
    with ServiceProcess() as service:
        assert service.address == f"127.0.0.1:{service.port}"
        assert service.exit_code is None
        with tq.Client(service.address) as client:
            assert client.health()
    assert service.exit_code == 0
    assert not psutil.pid_exists(service.pid)


def test_the_environment_is_for_other_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_TLS_CA", "TQ_AUTH_TOKENS_FILE", "TQ_CONFIG", "TQ_DATA_DIR"):
        monkeypatch.setenv(name, "/there/is/no/such")
    monkeypatch.setenv("TQ_HOST", "0.0.0.0")
    with ServiceProcess(env={"TQ_ROLE": "controller"}) as service:
        assert service.address.startswith("127.0.0.1:")
        with tq.Client(service.address, tls=False) as client:
            assert client.list_partitions() == []
            with pytest.raises(tq.errors.UnavailableError, match="no storage service"):
                client.put("train", {"x": np.zeros(1)}, timeout=0.1)


def test_it_is_started_again_on_its_port_with_what_it_kept(tmp_path: Path) -> None:
    with (
        ServiceProcess("--durability", "process", data_dir=tmp_path / "data") as service,
        tq.Client(service.address, timeout=60.0) as client,
    ):
        address, pid = service.address, service.pid
        client.put("train", {"x": np.arange(3)})
        assert service.kill() == -signal.SIGKILL
        assert service.exit_code == -signal.SIGKILL
        service.restart()
        assert (service.address, service.pid != pid) == (address, True)
        assert client.describe_partition("train").live_count == 3
        service.restart()  # while it runs
        assert client.describe_partition("train").live_count == 3


def test_its_port_is_given_to_no_other_program_while_it_is_dead() -> None:
    with ServiceProcess() as service:
        service.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", service.port))
        service.start()
        with tq.Client(service.address) as client:
            assert client.health()


def test_its_log_is_a_file_that_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with ServiceProcess("--host", "0.0.0.0", "--insecure", log=log) as service:
        assert service.read_log().startswith("before\n")
        assert "INSECURE" in service.read_log()
    with ServiceProcess() as silent, pytest.raises(ValueError, match="set log to a file path"):
        silent.read_log()


def test_why_it_did_not_start_is_said(tmp_path: Path) -> None:
    service = ServiceProcess("--role", "storage", log=tmp_path / "log")
    with pytest.raises(
        tq.errors.UnavailableError, match=r"code 1 before it started listening; .*log ends with:\n  \| error: role"
    ):
        service.start()
    assert service.exit_code == 1
    with pytest.raises(tq.errors.UnavailableError, match="see its log above"):
        ServiceProcess("--nonsense").start()


def test_what_does_not_listen_in_time_is_not_left_behind() -> None:
    silent = ListeningProcess(program("print('listening on'); import time; time.sleep(600)"), start_timeout=0.5)
    with pytest.raises(tq.errors.UnavailableError, match="did not start listening within"):
        silent.start()
    assert not psutil.pid_exists(silent.pid)


def test_an_address_that_comes_in_parts_is_read_whole() -> None:
    parts = "('warm\\nlisten', 'ing on he', 're:7', '1 (all)\\n')"
    text = f"import sys, time\nfor part in {parts}: sys.stdout.write(part)\ntime.sleep(600)"
    with ListeningProcess(program(text)) as listening:
        assert (listening.address, listening.port) == ("here:71", 71)


def test_a_program_that_prints_more_than_a_pipe_holds_goes_on(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    text = f"""
import pathlib, time
print("listening on here:7", flush=True)
for _ in range(1000):
    print("x" * 1000, flush=True)
pathlib.Path({str(printed)!r}).touch()
time.sleep(600)
"""
    with ListeningProcess(program(text)) as listening:
        while not printed.exists():  # the time limit of the test ends this
            assert listening.exit_code is None
            time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    "command",
    [
        program("import time; from tq_service.testing import ServiceProcess\nwith ServiceProcess(): time.sleep(600)"),
        [*COMMAND, "bench", "--seconds", "600"],
    ],
    ids=["program", "bench"],
)
def test_a_service_ends_with_the_program_that_started_it(command: list[str], number: signal.Signals) -> None:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as starter:
        services: list[psutil.Process] = []
        try:
            while not any(each.net_connections() for each in services):  # until it listens
                assert starter.poll() is None
                services = psutil.Process(starter.pid).children()
                time.sleep(0.05)
        finally:
            starter.send_signal(number)
    assert [each.pid for each in psutil.wait_procs(services, timeout=60)[1]] == []


def test_what_does_not_end_is_killed() -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    with ListeningProcess(program(ignores + SLEEPS), stop_timeout=0.1) as listening:
        assert listening.stop() == -signal.SIGKILL


def test_a_second_start_and_a_process_that_never_was_are_refused() -> None:
    listening = ListeningProcess(program(SLEEPS))
    with pytest.raises(RuntimeError, match="has not been started"):
        listening.kill()
    with listening, pytest.raises(RuntimeError, match="is already running"):
        listening.start()


@pytest.mark.parametrize("start_new_session", [False, True])
def test_a_session_of_its_own_has_no_signals_of_the_terminal(start_new_session: bool) -> None:
    with ListeningProcess(program(SLEEPS), start_new_session=start_new_session) as listening:
        assert (os.getsid(listening.pid) == listening.pid) is start_new_session


def test_the_code_of_the_document_runs(tmp_path: Path) -> None:
    program, *tests = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(tests) == 1
    names: dict[str, object] = {}
    exec(compile(program, str(DOCUMENT), "exec"), names)
    file = tmp_path / "test_documented.py"
    file.write_text(tests[0])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, file]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
