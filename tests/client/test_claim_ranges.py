"""Ranges of batches: `get_meta(batch_count=)` of both clients, and a service that is killed before it answers one."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from client_support import make_client

import tq_service as tq
from tq_service.errors import InvalidArgumentError
from tq_service.testing import ServiceProcess

ASKS = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2, "dp_rank": 0, "dp_size": 1}


def indexes(metas):
    return [meta.global_indexes if meta.status == "batch" else meta.status for meta in metas]


async def test_a_range_is_a_list_of_the_batches_that_single_claims_get(client):
    written = await client.put("train", {"x": np.arange(5)}, keys=list("abcde"))
    metas = await client.get_meta(**ASKS, batch_index=0, batch_count=3)
    assert indexes(metas) == [[0, 1], [2, 3]]
    singles = [await client.get_meta(**ASKS, batch_index=index) for index in range(2)]
    assert metas == singles
    assert [meta.keys for meta in metas] == [["a", "b"], ["c", "d"]]
    assert [(meta.task_name, meta.claim_id, meta.incarnation) for meta in metas] == [
        ("t", b"", written.incarnation)
    ] * 2
    assert [(await client.get_data(meta))["x"].tolist() for meta in metas] == [[0, 1], [2, 3]]
    assert indexes(await client.get_meta(**ASKS, batch_index=2, batch_count=3, max_wait=0)) == ["not_yet"]
    await client.seal_partition("train")
    assert indexes(await client.get_meta(**ASKS, batch_index=1, batch_count=9)) == [[2, 3], [4], "end"]
    assert indexes(await client.get_meta(**ASKS, batch_index=3, batch_count=9)) == ["end"]


async def test_a_range_of_one_is_a_list(client):
    await client.put("train", {"x": np.arange(5)})
    assert indexes(await client.get_meta(**ASKS, batch_index=0, batch_count=1)) == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_count": 0}, "batch_count is 0, expected 1 to 64"),
        ({"batch_count": 65}, "batch_count is 65; expected 1 to 64"),
        ({"batch_count": 2, "dp_rank": None, "dp_size": None, "batch_index": None}, "expected 1 for a queue worker"),
    ],
)
async def test_a_range_that_cannot_be_is_refused_and_claims_nothing(client, arguments, message):
    await client.put("train", {"x": np.arange(5)})
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        await client.get_meta(**{**ASKS, "batch_index": 0, **arguments})
    assert caught.value.field == "batch_count"
    assert (await client.check_consumption("train", "t", missing_ok=True)).consumed_count == 0


async def test_a_range_ends_before_its_answer_has_more_than_a_mebibyte(client):
    await client.put("train", {"x": np.arange(6_000)}, keys=[f"{row:0400}" for row in range(6_000)])
    found = []
    while len(found) < 6:
        asks = {**ASKS, "batch_size": 1_000, "batch_index": len(found)}
        metas = await client.get_meta(**asks, batch_count=6 - len(found))
        assert len(metas) == 2
        found += metas
    assert [meta.global_indexes[0] for meta in found] == list(range(0, 6_000, 1_000))


async def test_a_range_that_was_durable_but_not_answered_is_answered_by_the_retry(kind, tmp_path):
    marker = tmp_path / "marker"
    command = (sys.executable, str(Path(__file__).with_name("service_killed_before_answering.py")), str(marker))
    with ServiceProcess("--durability", "process", data_dir=tmp_path / "data", command=command) as server:
        client = make_client(kind, server.address, timeout=60)
        await client.put("train", {"x": np.arange(6)})
        marker.touch()
        claiming = asyncio.ensure_future(client.get_meta(**ASKS, batch_index=0, batch_count=2))
        await asyncio.to_thread(server.wait, 60)
        assert not marker.exists()
        await asyncio.to_thread(server.start)
        assert indexes(await claiming) == [[0, 1], [2, 3]]
        await asyncio.to_thread(server.restart)
        with tq.Client(server.address, timeout=60) as other:
            assert other.check_consumption("train", "t").consumed_count == 4
            assert indexes(other.get_meta(**ASKS, batch_index=1, batch_count=9)) == [[2, 3], [4, 5]]
        await client.aclose()
