"""Segments that are damaged while a service is down, or under it: their samples are named, and no others are lost."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_server import StartServer

import tq_service as tq
from tq_service.testing import COMMAND, ListeningProcess

ROWS, WIDTH = 8, 4096


def put_rows(client: Any, number: int) -> Any:
    data = {"tokens": torch.full((ROWS, WIDTH), number), "mask": torch.full((ROWS, WIDTH), -number)}
    return client.put("train", data, keys=[f"k{number}_{row}" for row in range(ROWS)])


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "segments").glob("*.seg"))


@pytest.mark.parametrize("shared_memory", ["off", "auto"])
def test_a_damaged_segment_names_its_samples(start_server: StartServer, tmp_path: Path, shared_memory: str) -> None:
    flags = {"data_dir": tmp_path, "durability": "process", "shared_memory": shared_memory}
    server = start_server(**flags)
    client = server.client()
    metas = [put_rows(client, number) for number in range(4)]
    client.put(metas[1], {"reward": torch.arange(ROWS * 1.0)})
    assert len(segments(tmp_path)) == 4
    server.stop()
    path = segments(tmp_path)[1]
    data = bytearray(path.read_bytes())
    data[70_000] ^= 0xFF
    path.write_bytes(data)

    client = start_server(**flags).client()
    with pytest.raises(tq.errors.DataLossError) as caught:
        client.get_data(tq.BatchMeta.concat(metas), data_fields=["tokens"])
    lost = metas[1].global_indexes
    assert caught.value.metadata["global_indexes"] == ",".join(map(str, lost))
    assert caught.value.metadata["partition_id"] == "train"
    assert caught.value.metadata["data_fields"] == "tokens"
    assert "'tokens' of samples 8 (k1_0), 9 (k1_1)" in str(caught.value)
    assert "of partition 'train' are lost" in str(caught.value)
    assert "checksum" in str(caught.value)
    rest = tq.BatchMeta.concat([metas[0], *metas[2:]])
    back = client.get_data(rest, data_fields=["tokens", "mask"])
    assert back["tokens"][:, 0].tolist() == [0] * 8 + [2] * 8 + [3] * 8
    assert client.get_data(metas[1], data_fields=["reward"])["reward"].tolist() == list(range(ROWS))
    assert client.storage_stat().damaged_put_count == 1

    # What is lost may be put again.
    client.put(metas[1], {"tokens": torch.ones((ROWS, WIDTH)).long(), "mask": torch.ones((ROWS, WIDTH)).long()})
    assert client.get_data(metas[1], data_fields=["tokens"])["tokens"].eq(1).all()
    assert client.storage_stat().damaged_put_count == 0


def test_a_segment_that_is_gone_is_told_before_anybody_reads(start_server: StartServer, tmp_path: Path) -> None:
    flags = {"data_dir": tmp_path, "durability": "process", "shared_memory": "off"}
    server = start_server(**flags)
    client = server.client()
    metas = [put_rows(client, number) for number in range(2)]
    server.stop()
    segments(tmp_path)[0].unlink()
    client = start_server(**flags).client()
    assert client.storage_stat().damaged_put_count == 1
    with pytest.raises(tq.errors.DataLossError, match="is missing"):
        client.get_data(metas[0])
    assert client.get_data(metas[1])["mask"].eq(-1).all()
    client.clear_partition("train")
    stat = client.storage_stat()
    assert (stat.used_bytes, stat.damaged_put_count) == (0, 0)


def test_a_segment_that_is_cut_short_under_the_service_is_an_error_of_its_reads(tmp_path: Path) -> None:
    command = (*COMMAND, "serve", "--port", "0", "--data-dir", str(tmp_path), "--shared-memory", "off")
    with ListeningProcess(command) as service, tq.Client(service.address, timeout=10.0) as client:
        lost = client.put("lost", {"x": np.ones((8, 1 << 20), np.uint8)})
        for path in tmp_path.rglob("*.seg"):
            os.truncate(path, 0)
        kept = client.put("kept", {"x": np.ones((2, 1 << 20), np.uint8)})
        with pytest.raises(tq.errors.DataLossError, match="its bytes cannot be read"):
            client.get_data(lost)
        assert client.get_data(kept)["x"].shape == (2, 1 << 20)
        client.clear_partition("lost")
        assert client.get_data(client.put("new", {"x": np.arange(3)}))["x"].tolist() == [0, 1, 2]
        assert service.exit_code is None
