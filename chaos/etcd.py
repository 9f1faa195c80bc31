"""The members of a real etcd, as processes that can be killed and restarted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chaos.cluster import Process
from chaos.hosts import Host

_BROUGHT: Final = Path(__file__).parents[1] / ".venv" / "etcd" / "usr" / "bin" / "etcd"


def etcd_program() -> str:
    """Return the path of the etcd program: the system's, or the one installed by `make install`.

    Raises:
        FileNotFoundError: etcd is not installed.
    """
    program = shutil.which("etcd") or (str(_BROUGHT) if _BROUGHT.is_file() else None)
    if program is None:
        raise FileNotFoundError("no etcd here; run `make install` on a system with apt-get, or put etcd on PATH")
    return program


def why_no_etcd() -> str:
    """Return the reason to skip tests that need a real etcd, or an empty string if etcd is installed."""
    try:
        etcd_program()
    except FileNotFoundError as error:
        return str(error)
    return ""


def etcd_members(
    ports: Sequence[tuple[int, int]], directory: Path, hosts: Sequence[Host] | None = None
) -> dict[str, Process]:
    """Return the processes of the members by name, not yet started.

    Args:
        ports: two ports per member, one for clients and one for the other members.
        directory: directory for data and logs.
        hosts: host of each member, or None for this host's loopback address.
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
