"""A snapshot on its way to another controller arrives whole, or leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tq_service.errors import UnavailableError
from tq_service.internal.v1 import cluster_pb2 as pb
from tq_service.internal.v1.cluster_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server
from tq_service.journal.files import snapshot_path
from tq_service.server.cluster_member import SnapshotServicer, fetch_snapshot
from tq_service.wire.connection import Credentials

NUMBER = 7
CONTENT = bytes(range(256)) * 12_000  # three parts, the last one short


class Store:
    """Has one snapshot."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def newest_snapshot(self, least_number: int) -> tuple[int, Path]:
        return NUMBER, self.path


class SendsParts(ClusterServiceServicer):
    """Sends these parts, as of a snapshot with CONTENT."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    async def FetchSnapshot(  # noqa: N802  (the name of the rpc)
        self, request: pb.FetchSnapshotRequest, context: Any
    ) -> AsyncIterator[pb.FetchSnapshotResponse]:
        for part in self.parts:
            yield pb.FetchSnapshotResponse(number=NUMBER, size_bytes=len(CONTENT), data=part)


@contextlib.asynccontextmanager
async def serving(servicer: ClusterServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_ClusterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def fetch(address: str, directory: Path, least_number: int = NUMBER) -> int:
    return await fetch_snapshot(address, Credentials(None, None, None), directory, least_number)


async def test_it_arrives_as_it_was_also_where_a_newer_one_replaces_it_meanwhile(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    target = tmp_path / "target"
    target.mkdir()
    sends = SnapshotServicer(Store(source)).FetchSnapshot(pb.FetchSnapshotRequest(), None)  # type: ignore[arg-type]
    parts = [await anext(sends)]
    source.unlink()
    parts += [part async for part in sends]
    assert b"".join(part.data for part in parts) == CONTENT
    async with serving(SendsParts([part.data for part in parts])) as address:
        assert await fetch(address, target) == NUMBER
    assert snapshot_path(target, NUMBER).read_bytes() == CONTENT
    assert len(names_in(target)) == 1


@pytest.mark.parametrize(
    ("parts", "words"), [([], "is empty"), ([CONTENT[:-1]], f"after {len(CONTENT) - 1} of {len(CONTENT)} bytes")]
)
async def test_of_one_that_ends_early_nothing_is_left(tmp_path: Path, parts: list[bytes], words: str) -> None:
    async with serving(SendsParts(parts)) as address:
        with pytest.raises(UnavailableError, match=words):
            await fetch(address, tmp_path)
    assert not names_in(tmp_path)


async def test_one_that_is_older_than_what_is_needed_is_not_written(tmp_path: Path) -> None:
    async with serving(SendsParts([CONTENT])) as address:
        with pytest.raises(UnavailableError, match="snapshot 7; expected snapshot 8 or later"):
            await fetch(address, tmp_path, NUMBER + 1)
    assert not names_in(tmp_path)
