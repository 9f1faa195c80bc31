"""A few rounds of `make chaos`: the service, its parts and its clients are killed, and everything promised holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import run_whole


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_few_rounds(tmp_path: Path) -> None:
    flags = ["--topology", "split", "--durability", "process", "--rounds", "3", "--seconds", "0.3", "--seed", "4"]
    run = run_whole(["-m", "chaos", *flags, "--output", str(tmp_path)])
    assert run.returncode == 0, run.stdout
    assert "0 violations" in run.stdout
    assert "SIGKILL" in run.stdout


@pytest.mark.timeout(300)
def test_what_is_lost_is_found(tmp_path: Path) -> None:
    """Without durability a kill loses what was acknowledged: the run says so, and where the logs are."""
    program = (
        "import chaos.__main__ as main\n"
        "main.without_torch()\n"
        "main._CLIENTS_ONLY = ('controller',)\n"
        f"raise SystemExit(main.main(['--topology', 'embedded', '--durability', 'memory', '--rounds', '1', "
        f"'--seconds', '0.3', '--output', {str(tmp_path)!r}]))\n"
    )
    run = run_whole(["-c", program])
    assert run.returncode == 1, run.stdout
    assert "VIOLATION" in run.stdout
    assert f"logs and data in {tmp_path}" in run.stdout
