from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.processes import ProcessFailedError, ProcessGroup


def test_a_failing_process_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "logs") as processes:
        processes.start_role("no_such_role", 1, tmp_path / "settings.json")
        processes.wait_for_workers(30.0)
        with pytest.raises(ProcessFailedError, match="no_such_role_1 ended with exit code 1") as raised:
            processes.check()
    assert "No module named" in str(raised.value)


def test_leaving_ends_what_runs(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "logs") as processes:
        processes.start_role("reward_worker", 0, tmp_path / "settings.json")
        assert processes.running("reward_worker")
        assert not processes.running("trainer")
    assert not processes.running("reward_worker")
