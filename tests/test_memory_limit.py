"""The memory that a process may use, in control groups as systems make them."""

from pathlib import Path

import pytest

from tq_service.memory_limit import memory_limit_bytes

MIB = 1 << 20
MACHINE = memory_limit_bytes(Path("/nowhere"))
NO_LIMIT_V1 = 9223372036854771712
V2_MOUNT = "30 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/memory rw shared:11 master:2 - cgroup cgroup rw,memory
"""


def limit_of(root: Path, cgroup: str | None, mountinfo: str | None, limits: dict[str, object]) -> int:
    """Return the limit in a tree with these files."""
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    files |= {f"sys/fs/cgroup/{path}": f"{limit}\n" for path, limit in limits.items()}
    for path, text in files.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return memory_limit_bytes(root)


STEP = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
SCOPE = "user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"
SLURM_V1 = "slurm/uid_1000/job_7/step_0"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "limits", "expected"),
    [
        pytest.param(
            f"0::/{STEP}\n",
            V2_MOUNT,
            {f"{STEP}/memory.max": "max", f"{STEP[:-7]}/memory.max": "max",
             "system.slice/slurmstepd.scope/job_7/step_0/memory.max": 300 * MIB,
             "system.slice/slurmstepd.scope/job_7/memory.max": 200 * MIB,
             "system.slice/slurmstepd.scope/memory.max": "max", "system.slice/other/memory.max": MIB},
            200 * MIB,
            id="slurm step, v2: the job allows less than the step",
        ),
        pytest.param(
            f"0::/{SCOPE}\n", V2_MOUNT,
            {f"{SCOPE}/memory.max": 64 * MIB, "user.slice/memory.max": 100 * MIB}, 64 * MIB, id="systemd scope, v2",
        ),
        pytest.param(
            f"0::/{SCOPE}\n", V2_MOUNT,
            {f"{SCOPE}/memory.max": "max", "user.slice/memory.max": "max"}, MACHINE, id="no limit anywhere, v2",
        ),
        pytest.param(
            f"5:cpu,cpuacct:/\n4:memory:/{SLURM_V1}\n1:name=systemd:/user.slice\n0::/user.slice\n", V1_MOUNTS,
            {f"memory/{SLURM_V1}/memory.limit_in_bytes": NO_LIMIT_V1,
             "memory/slurm/uid_1000/job_7/memory.limit_in_bytes": 80 * MIB,
             "memory/memory.limit_in_bytes": NO_LIMIT_V1, "unified/user.slice/memory.max": "max"},
            80 * MIB,
            id="slurm step, v1",
        ),
        pytest.param(
            "0::/\n", V2_MOUNT, {"memory.max": 128 * MIB}, 128 * MIB, id="container with its own namespace, v2"
        ),
        pytest.param(
            "0::/\n", V2_MOUNT.replace(" / /sys", " /../../pod1/c2 /sys"), {"memory.max": 128 * MIB}, 128 * MIB,
            id="mount of another namespace, v2",
        ),
        pytest.param(
            "0::/../job\n", V2_MOUNT, {"memory.max": 128 * MIB}, 128 * MIB, id="moved out of its namespace, v2"
        ),
        pytest.param(
            "4:memory:/docker/c1\n", V1_MOUNTS.replace(" / /sys/fs/cgroup/memory", " /docker/c1 /sys/fs/cgroup/memory"),
            {"memory/memory.limit_in_bytes": 96 * MIB}, 96 * MIB, id="container without a namespace, v1",
        ),
        pytest.param(
            "4:memory:/docker/c1/inner\n",
            V1_MOUNTS.replace(" / /sys/fs/cgroup/memory", " /docker/c1 /sys/fs/cgroup/memory"),
            {"memory/inner/memory.limit_in_bytes": 48 * MIB, "memory/memory.limit_in_bytes": 96 * MIB}, 48 * MIB,
            id="group within a container, v1",
        ),
        pytest.param(
            "0::/a b\n", V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/with\040space"),
            {"with space/a b/memory.max": 32 * MIB}, 32 * MIB, id="names with spaces",
        ),
        pytest.param(
            f"0::/{STEP}\n", None, {"system.slice/memory.max": 64 * MIB}, 64 * MIB, id="no mountinfo, v2"
        ),
        pytest.param(
            "4:memory:/job\n", None, {"memory/job/memory.limit_in_bytes": 64 * MIB}, 64 * MIB, id="no mountinfo, v1"
        ),
        pytest.param(None, V2_MOUNT, {"memory.max": 64 * MIB}, 64 * MIB, id="no list of own groups"),
        pytest.param("garbled\n0::\n", "garbled\n1 - \n", {}, MACHINE, id="garbled files"),
        pytest.param(None, None, {}, MACHINE, id="no control groups"),
        pytest.param("0::/job\n", V2_MOUNT, {"job/memory.max": "soon", "memory.max": ""}, MACHINE, id="garbled limits"),
        pytest.param(
            "0::/job\n", V2_MOUNT, {"job/memory.max": MACHINE * 4}, MACHINE, id="more than the machine has"
        ),
    ],
)  # fmt: skip
def test_the_smallest_limit_on_the_way_to_the_root_holds(
    tmp_path: Path, cgroup: str | None, mountinfo: str | None, limits: dict[str, object], expected: int
) -> None:
    assert limit_of(tmp_path, cgroup, mountinfo, limits) == expected


def test_a_limit_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/job/step/memory.max").mkdir(parents=True)  # any reader gets an OSError
    limits: dict[str, object] = {"job/memory.max": 64 * MIB}
    assert limit_of(tmp_path, "0::/job/step\n", V2_MOUNT, limits) == 64 * MIB
