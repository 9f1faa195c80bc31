"""A real etcd of some members on loopback, as processes that can be killed and started again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chaos.cluster import Process

_BROUGHT: Final = Path(__file__).parents[1] / ".venv" / "etcd" / "usr" / "bin" / "etcd"


def etcd_program() -> str:
    """Return the program etcd: of the system, or the one that `make install` brought.

    Raises:
        FileNotFoundError: there is none.
    """
    program = shutil.which("etcd") or (str(_BROUGHT) if _BROUGHT.is_file() else None)
    if program is None:
        raise FileNotFoundError("no etcd here; `make install` brings it where there is apt-get, or put one on PATH")
    return program


def etcd_members(ports: Sequence[tuple[int, int]], directory: Path) -> dict[str, Process]:
    """Return the processes of the members by name, which are not started.

    Args:
        ports: of each member: for clients, and for the other members.
        directory: gets data and logs.
    """
    program = etcd_program()
    members = [f"etcd-{number}" for number in range(len(ports))]
    cluster = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, (_, peer) in zip(members, ports, strict=True))
    found = {}
    for name, (client, peer) in zip(members, ports, strict=True):
        flags = {
            "name": name,
            "data-dir": str(directory / f"data-{name}"),
            "listen-client-urls": f"http://127.0.0.1:{client}",
            "advertise-client-urls": f"http://127.0.0.1:{client}",
            "listen-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-cluster": cluster,
            "initial-cluster-state": "new",
        }
        command = [program, *(part for flag, value in flags.items() for part in (f"--{flag}", value))]
        found[name] = Process(name, command, directory / f"{name}.log")
    return found
