"""A real etcd of some members, as processes that can be killed and started again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chaos.cluster import Process
from chaos.hosts import Host

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


def why_no_etcd() -> str:
    """Return why tests of a real etcd are skipped, or an empty text if there is one."""
    try:
        etcd_program()
    except FileNotFoundError as error:
        return str(error)
    return ""


def etcd_members(
    ports: Sequence[tuple[int, int]], directory: Path, hosts: Sequence[Host] | None = None
) -> dict[str, Process]:
    """Return the processes of the members by name, which are not started.

    Args:
        ports: of each member: for clients, and for the other members.
        directory: gets data and logs.
        hosts: of each member; None: this one, and the loopback address.
    """
    program = etcd_program()
    hosts = hosts or [Host("127.0.0.1", (), "lo")] * len(ports)
    members = [
        (f"etcd-{number}", host, f"http://{host.ip}:{client}", f"http://{host.ip}:{peer}")
        for number, (host, (client, peer)) in enumerate(zip(hosts, ports, strict=True))
    ]
    found = {}
    for name, host, client_url, peer_url in members:
        flags = {
            "name": name,
            "data-dir": str(directory / f"data-{name}"),
            "listen-client-urls": client_url,
            "advertise-client-urls": client_url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": ",".join(f"{other}={url}" for other, _, _, url in members),
            "initial-cluster-state": "new",
        }
        command = [*host.enter, program, *(part for flag, value in flags.items() for part in (f"--{flag}", value))]
        found[name] = Process(name, command, directory / f"{name}.log")
    return found
