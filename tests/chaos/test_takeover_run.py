"""Two rounds of `python -m chaos.takeover`: a leader is cut off, a storage service is lost for good, and all holds."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ROOT, run_whole

from chaos.etcd import why_no_etcd
from chaos.hosts import why_not

WHY_NOT = why_not()
WHY_NO_ETCD = why_no_etcd()

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.mark.nightly
@pytest.mark.skipif(bool(WHY_NO_ETCD), reason=WHY_NO_ETCD)
@pytest.mark.timeout(300)
def test_two_rounds(tmp_path: Path) -> None:
    targets = ["cut leader from etcd", "lose storage"]
    flags = ["--rounds", "2", "--seconds", "0.3", "--cut-seconds", "7", "--lease-seconds", "3", "--targets", *targets]
    run = run_whole(["-m", "chaos.takeover", *flags, "--output", str(tmp_path)])
    assert run.returncode == 0, run.stdout
    assert "0 violations" in run.stdout
    assert all(f"{target} (" in run.stdout for target in targets)


def run_in_namespace(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a network namespace; fails if a process that it leaves behind keeps its output open."""
    return subprocess.run(
        ["unshare", "-Urn", sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


# Prints the process ids of the hosts as they are made.
RECORD_HOSTS = """
import os, signal
from chaos import hosts
add = hosts.Network.add
def record(network):
    host = add(network)
    print(host.enter[2], flush=True)
    return host
hosts.Network.add = record
"""


def wait_for_ends(process_ids: list[int]) -> None:
    for process_id in process_ids:
        try:
            ended = os.pidfd_open(process_id)
        except ProcessLookupError:
            continue
        try:
            assert select.select([ended], [], [], 60)[0], f"process {process_id} still runs"
        finally:
            os.close(ended)


def test_hosts_end_if_there_is_no_etcd(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from chaos import etcd, takeover
etcd._BROUGHT = Path("/nowhere")
etcd.shutil.which = lambda name: None
takeover.main(["--rounds", "1", "--output", {str(tmp_path)!r}])
"""
    run = run_in_namespace(RECORD_HOSTS + program)
    assert run.returncode == 1
    assert "no etcd here" in run.stderr
    hosts = list(map(int, run.stdout.split("\n")[1:-1]))
    assert len(hosts) == 3
    wait_for_ends(hosts)


def test_hosts_end_if_their_program_is_killed() -> None:
    run = run_in_namespace(RECORD_HOSTS + "hosts.Network().add()\nos.kill(os.getpid(), signal.SIGKILL)")
    assert run.returncode == -signal.SIGKILL
    (host,) = map(int, run.stdout.split())
    wait_for_ends([host])
