"""Partitions that release samples by themselves, through a real server, with both clients."""

import asyncio
import logging
import time

import pytest
import torch
from client_support import make_client, next_update, watching

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running

CLAIM = {"partition_id": "p", "task_name": "train", "data_fields": ["x"], "batch_size": 1, "max_wait": 0.0}
SAVED = tq.Release("saved", ["train"])


async def put(client, count, **arguments):
    return await client.put("p", {"x": torch.arange(count)}, **arguments)


async def batch(client, index, **arguments):
    return await client.get_meta(**{**CLAIM, "batch_index": index, "dp_rank": 0, "dp_size": 1, **arguments})


async def counts(client):
    found = await client.describe_partition("p")
    return found.summary.present_count, found.released_count, found.expired_count


async def test_samples_are_released_by_what_the_trainer_reports_and_their_keys_can_be_used_again(client):
    await client.create_partition("p", release=SAVED)
    assert (await client.describe_partition("p")).release == tq.Release("saved", ("train",))
    await put(client, 4, keys=[*"abcd"])
    for index in range(3):
        await batch(client, index)
    await client.advance("p", "train", trained=2)
    assert await counts(client) == (4, 0, 0)
    await client.publish_version(1, trained={("p", "train"): 2})
    progress = await client.advance("p", "train", saved=1)
    assert (progress.trained_batch_count, progress.saved_batch_count) == (3, 2)
    assert await counts(client) == (2, 2, 0)
    assert (await client.get_data(await batch(client, 2)))["x"].tolist() == [2]
    await put(client, 1, keys=["a"], key_mode="new")
    with pytest.raises(tq.errors.AlreadyExistsError):
        await put(client, 1, keys=["c"], key_mode="new")


async def test_a_publication_releases_what_it_reports_as_trained(client):
    await client.create_partition("p", release=tq.Release("trained", ["train"]))
    await put(client, 2)
    await batch(client, 0)
    await client.publish_version(1, trained={("p", "train"): 0})
    assert await counts(client) == (1, 1, 0)


async def test_a_batch_of_released_samples_is_refused_with_what_to_do(client):
    await client.create_partition("p", release=SAVED)
    await put(client, 6)
    for index in range(4):
        await batch(client, index)
    await client.advance("p", "train", saved=1)
    for call in (
        batch(client, 1),
        client.restart_ranks("p", "train", dp_size=2, trained=0),
    ):
        with pytest.raises(tq.errors.SamplesClearedError, match=r"expected 2 or more.*covers batch 1") as raised:
            await call
        assert {"got": "1", "expected": "2"}.items() <= raised.value.metadata.items()
    await client.advance("p", "train", trained=3)
    restarted = await client.restart_ranks("p", "train", dp_size=2, trained=1)
    assert (restarted.batch_index, restarted.repeated_batch_count, restarted.repeated_sample_count) == (2, 2, 2)
    again = await client.restart_ranks("p", "train", dp_size=2, trained=1, epoch=0)
    assert (again.batch_index, again.repeated_batch_count, again.repeated_sample_count) == (2, 0, 0)
    assert (await batch(client, 2, dp_size=2, dp_rank=1)).global_indexes == [3]


async def test_a_queue_worker_has_to_lease_and_releases_by_its_acknowledgement(client):
    await client.create_partition("p", release=tq.Release("trained"), tasks=["train", "reward"])
    await put(client, 2)
    jobs = {**CLAIM, "task_name": "reward", "batch_size": 2}
    with pytest.raises(tq.errors.PreconditionError, match="claims samples without a lease; expected a lease"):
        await client.get_meta(**jobs)
    await batch(client, 0)
    await client.advance("p", "train", trained=0)
    leased = await client.get_meta(**jobs, lease=60.0)
    await client.put(leased, {"y": torch.arange(2)}, ack=True)
    assert await counts(client) == (1, 1, 0)
    await client.ack(leased)  # a retry finds nothing to do
    assert (await client.lookup_samples("p"))[0].global_indexes == [1]


async def test_a_watch_names_them(client):
    await client.create_partition("p", release=SAVED)
    await put(client, 2, keys=["a", "b"])
    await batch(client, 0)
    listed = (await client.lookup_samples("p"))[0].revision
    await client.advance("p", "train", saved=0)
    async with watching(client.watch("p", revision=listed)) as watch:
        (changed,) = (await next_update(watch)).partitions
    assert (changed.cleared_indexes.tolist(), changed.cleared_keys) == ([0], ("a",))


async def test_settings_that_differ_are_refused_with_both_rules(client):
    await client.create_partition("p", release=SAVED)
    await client.create_partition("p", release=tq.Release("saved", ("train",)))
    with pytest.raises(tq.errors.AlreadyExistsError, match=r"release is saved by train, got 60 s old"):
        await client.create_partition("p", release=tq.Release(ttl_seconds=60.0))
    with pytest.raises(tq.errors.InvalidArgumentError, match="expected type Release"):
        await client.create_partition("q", release="saved")
    with pytest.raises(tq.errors.InvalidArgumentError, match="names no tasks") as raised:
        await client.create_partition("q", release=tq.Release("saved"))
    assert raised.value.field == "release"


async def test_a_put_that_waits_for_bytes_says_when_samples_are_released(client):
    await client.create_partition("p", max_bytes=16, release=SAVED)
    await put(client, 2)
    await batch(client, 0)
    with pytest.raises(
        tq.errors.QuotaExceededError, match="its max_bytes is 16, and samples are released once saved by train"
    ):
        await put(client, 1, timeout=0.2)
    waiting = asyncio.ensure_future(put(client, 1, timeout=30.0))
    await asyncio.sleep(0)
    await client.advance("p", "train", saved=0)
    await waiting
    assert await counts(client) == (2, 1, 0)


async def until(client, expected):
    end = time.monotonic() + 30
    while (found := await counts(client)) != expected and time.monotonic() < end:  # noqa: ASYNC110  (nothing tells it)
        await asyncio.sleep(0.05)
    assert found == expected


async def test_old_samples_go_by_themselves_and_writers_get_their_places(client):
    admission = tq.Admission("train", 2)
    await client.create_partition("p", admissions=[admission], release=tq.Release(ttl_seconds=0.2))
    await put(client, 2)
    await put(client, 2, timeout=30.0)
    await until(client, (0, 0, 4))
    assert (await client.describe_partition("p")).expired_count == 4


async def test_rules_and_counts_outlive_the_process_and_are_in_checkpoints(kind, tmp_path, caplog):
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data", checkpoint_dir=tmp_path / "saved")

    def connect(app):
        return make_client(kind, f"127.0.0.1:{app.port}", timeout=20)

    async with running(settings) as app:
        client = connect(app)
        await client.create_partition("p", release=tq.Release("saved", ["train"], ttl_seconds=3600.0))
        await put(client, 6)
        for index in range(5):
            await batch(client, index)
        await client.advance("p", "train", trained=4, saved=1)
        await client.checkpoint("here")
        await client.advance("p", "train", saved=2)
        assert await counts(client) == (3, 3, 0)
        await client.aclose()
    for _ in range(2):  # out of the journal, then out of the snapshot of the first start
        async with running(settings) as app:
            client = connect(app)
            assert await counts(client) == (3, 3, 0)
            with pytest.raises(tq.errors.SamplesClearedError, match="expected 3 or more"):
                await client.restart_ranks("p", "train", dp_size=2, trained=0)
            await client.aclose()
    async with running(settings) as app:
        client = connect(app)
        await client.restore("here", replace=True)
        assert await counts(client) == (4, 2, 0)
        assert (await client.describe_partition("p")).release == tq.Release("saved", ["train"], 3600.0)
        with caplog.at_level(logging.WARNING, "tq_service.server.controller_servicer"):
            restarted = await client.restart_ranks("p", "train", dp_size=1, trained=1)
        assert (restarted.repeated_batch_count, restarted.repeated_sample_count) == (3, 3)
        assert "ranks restarted from a checkpoint; some samples will be trained on again" in caplog.text
        assert (await client.get_data(await batch(client, 2)))["x"].tolist() == [2]
        await client.advance("p", "train", saved=2)
        assert await counts(client) == (3, 3, 0)
        await client.aclose()


async def test_ages_begin_again_with_a_start(kind, tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data")
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await client.create_partition("p", release=tq.Release(ttl_seconds=2.5))
        await put(client, 2)
        await client.aclose()
    await asyncio.sleep(2.6)  # longer than the age
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        assert list(app.controller.catalog.expire_samples()) == []
        assert await counts(client) == (2, 0, 0)
        await until(client, (0, 0, 2))
        await client.aclose()
