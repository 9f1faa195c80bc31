"""Watches of both clients: what they say is what lists say, whatever happens in between."""

import asyncio

import numpy as np
import pytest
from certificates import add_token
from client_support import make_client, next_update, watching
from watched_table import WatchedTable, listed_state

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running
from tq_service.types import Revision

CLAIM = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2, "max_wait": 0.0}


def rows(*values):
    return {"x": np.array(values)}


def settings(**options):
    return ServeSettings(host="127.0.0.1", port=0, max_bytes=64 << 20, **options)


async def now(client):
    return (await client.list_partitions()).revision


async def test_each_change_is_seen_and_the_end_is_what_a_list_says(kind, client):
    await client.put("early", rows(1, 2), keys=["a", "b"])
    table = WatchedTable()
    async with watching(client.watch(progress_interval=0.2)) as watch:

        async def check():
            await table.follow(watch, await now(client))
            assert table.state() == await listed_state(client)

        await check()
        assert table.samples["early"][0] == (("a", None, {}), {"x"})
        tags = [{"s": 1}, {"s": "two"}, {"s": [3]}, {}]
        meta = await client.put("train", rows(1, 2, 3, 4), keys=list("abcd"), groups=list("gghh"), custom_meta=tags)
        await check()
        await client.put(meta.select_samples([0, 1]), {"y": np.zeros(2)})
        await client.set_custom_meta(meta, [{"s": None, "u": 1}] * 4)
        await client.insert("train", 3, keys=list("efg"), state="held")
        await check()
        assert table.samples["train"][0] == (("a", "g", {"u": 1}), {"x", "y"})
        await client.clear_fields(meta.select_samples([0]), data_fields=["y"])
        await check()
        assert table.samples["train"][0] == (("a", "g", {"u": 1}), {"x"})
        leased = await client.get_meta(**CLAIM, lease=60)
        await check()
        assert table.tasks["train"]["t"][1] == 2
        await client.ack(leased)
        await client.put(meta.select_samples([3]), state="failed")
        await client.reset_consumption("train", "t")
        await check()
        assert await client.clear_samples("train", keys=["a", "f"]) == 2
        await client.seal_partition("train")
        await check()
        assert table.summaries["train"].sealed
        await client.clear_partition("train")
        await client.put("train", rows(9))
        await check()
        assert table.reset_count == 1


async def test_a_watch_goes_on_from_a_list(kind, client):
    await client.put("train", rows(1, 2, 3), keys=list("abc"))
    listed = (await client.lookup_samples("train"))[0].revision
    assert (await client.describe_partition("train")).revision == listed == await now(client)
    await client.clear_samples("train", keys=["b"])
    await client.put("train", {"y": np.zeros(1)}, keys=["c"])
    async with watching(client.watch("train", revision=listed)) as watch:
        update = await next_update(watch)
        (changed,) = update.partitions
        assert not update.is_reset
        assert (changed.cleared_indexes.tolist(), changed.cleared_keys) == ([1], ("b",))
        assert (changed.samples.keys, changed.samples.data_fields) == (["c"], ["x", "y"])
        assert update.revision == watch.revision


async def test_a_watch_is_told_that_nothing_has_changed_and_ends_when_it_is_closed(kind, client):
    async with watching(client.watch("train", progress_interval=0.1)) as watch:
        assert (await next_update(watch)).is_reset
        await client.put("other", rows(1))
        last = await now(client)
        while (update := await next_update(watch)).revision != last:
            assert not update.partitions and not update.is_reset
    assert await next_update(watch) is None


async def test_what_is_not_watched_is_not_sent(kind, client):
    await client.put("train", rows(1, 2, 3, 4), keys=list("abcd"))
    start = await now(client)
    await client.get_meta(**CLAIM)
    async with watching(client.watch(revision=start, samples=False)) as watch:
        (changed,) = (await next_update(watch)).partitions
        assert changed.samples is None and changed.summary.present_count == 4
        assert [(task.task_name, task.consumed_count) for task in changed.tasks] == [("t", 2)]
        await client.clear_samples("train", keys=["d"])
        (changed,) = (await next_update(watch)).partitions
        assert changed.cleared_indexes.size == 0 and changed.summary.present_count == 3
    async with watching(client.watch(revision=start, tasks=False, progress_interval=0.1)) as watch:
        (changed,) = (await next_update(watch)).partitions
        assert not changed.tasks and changed.cleared_keys == ("d",)
        await client.get_meta(**CLAIM)
        assert not (await next_update(watch)).partitions


async def test_a_partition_that_came_and_went_unseen_is_not_mentioned(client):
    start = await now(client)
    await client.put("short", rows(1))
    await client.clear_partition("short")
    async with watching(client.watch(revision=start)) as watch:
        assert not (await next_update(watch)).partitions


async def test_many_samples_come_in_parts(client):
    keys = np.array([f"sample-{number}" for number in range(20_000)])
    for some in np.array_split(keys, 2):
        await client.put("train", {"x": np.arange(some.size)}, keys=some)
    async with watching(client.watch()) as watch:
        table, count = WatchedTable(), 0
        while table.revision is None:
            table.apply(await next_update(watch))
            count += 1
        assert count > 3
        assert [row[0][0] for row in table.samples["train"].values()] == keys.tolist()
        await client.clear_samples("train", keys=keys[:9_000])
        await table.follow(watch, await now(client))
        assert sorted(table.samples["train"]) == list(range(9_000, 20_000))


@pytest.mark.parametrize("number", [0, -1, 1 << 40])
async def test_a_revision_that_is_none_is_rejected(client, number):
    revision = Revision(instance_id=(await now(client)).instance_id, number=number)
    async with watching(client.watch(revision=revision)) as watch:
        with pytest.raises(tq.errors.InvalidArgumentError, match="revision"):
            await next_update(watch)
    async with watching(client.watch(progress_interval=0.01)) as watch:
        with pytest.raises(
            tq.errors.InvalidArgumentError, match=r"progress_interval is 0\.01 s; expected at least 0\.1 s"
        ):
            await next_update(watch)


@pytest.mark.parametrize("has_data_dir", [False, True])
async def test_after_a_restart_a_watch_starts_over_and_a_revision_is_compacted(kind, tmp_path, has_data_dir):
    options = {"data_dir": tmp_path, "durability": "process"} if has_data_dir else {}
    async with running(settings(**options)) as app:
        port = app.port
        client = make_client(kind, f"127.0.0.1:{port}", timeout=20)
        await client.put("train", rows(1, 2), keys=["a", "b"])
        table, before = WatchedTable(), await now(client)
        watch = client.watch(progress_interval=0.2)
        await table.follow(watch, before)
    async with running(settings(**options).model_copy(update={"port": port})):
        await client.put("train", rows(3), keys=["c"])
        table.revision = None
        async with watching(watch):
            while table.revision is None or table.revision.instance_id == before.instance_id:
                table.apply(await next_update(watch))
            await table.follow(watch, await now(client))
            assert table.reset_count == 2
            assert table.state() == await listed_state(client)
            assert [key for (key, _, _), _ in table.samples["train"].values()] == list("abc" if has_data_dir else "c")
        async with watching(client.watch(revision=before)) as stale:
            with pytest.raises(tq.errors.CompactedError, match=r"another instance of the service.*List again"):
                await next_update(stale)
        await client.aclose()


async def test_a_watch_that_missed_too_much_starts_over_or_fails_as_compacted(kind, monkeypatch):
    monkeypatch.setattr("tq_service.serving.history.MOST_GONE_ROWS", 64)
    async with running(settings()) as app:
        calls = app.controller.watches.calls
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await client.put("train", rows(*range(100)))
        table, listed = WatchedTable(), await now(client)
        async with watching(client.watch()) as watch:
            await table.follow(watch, listed)
            await client.clear_samples("train", global_indexes=range(1, 90))
            await table.follow(watch, await now(client))  # the partition comes anew
            assert table.reset_count == 1
            assert table.state() == await listed_state(client)
            watch._call.cancel()  # as if the connection broke
            while calls.count:  # noqa: ASYNC110  (that a call has ended is told by no event)
                await asyncio.sleep(0.01)
            for _ in range(10):
                await client.put("other", rows(1, 2))
                await client.clear_partition("other")
            await table.follow(watch, await now(client))
            assert table.reset_count == 2
            assert table.state() == await listed_state(client)
        async with watching(client.watch(revision=listed)) as stale:
            with pytest.raises(tq.errors.CompactedError, match=f"revision {listed.number} is too old"):
                await next_update(stale)
        await client.aclose()


async def test_what_is_restored_is_seen_in_place_of_what_was_there(kind, tmp_path):
    async with running(settings(checkpoint_dir=tmp_path)) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await client.put("train", rows(1, 2), keys=["a", "b"])
        await client.get_meta(**CLAIM)
        await client.checkpoint("one")
        table = WatchedTable()
        async with watching(client.watch()) as watch:
            await client.put("train", rows(3), keys=["c"])
            await client.put("other", rows(3), keys=["c"])
            await table.follow(watch, await now(client))
            for clears in (False, True):
                if clears:
                    for name in list(table.summaries):
                        await client.clear_partition(name)
                await client.restore("one", replace=not clears)
                await table.follow(watch, await now(client))
                assert table.state() == await listed_state(client)
                assert [key for (key, _, _), _ in table.samples["train"].values()] == ["a", "b"]
                assert list(table.summaries) == ["train"]
            assert table.reset_count == 1
        await client.aclose()


async def test_a_token_sees_what_it_is_for(kind, tmp_path):
    tokens = tmp_path / "tokens.toml"
    own = add_token(tokens, "own", ["read"], ("run-7/",))
    made = add_token(tokens, "producer", ["produce"], ("run-7/",))
    everything = add_token(tokens, "all", ["admin"])
    async with running(settings(auth_tokens_file=tokens)) as app:
        address = f"127.0.0.1:{app.port}"
        admin, reader, blind = (make_client(kind, address, timeout=20, token=each) for each in (everything, own, made))
        async with watching(reader.watch(progress_interval=0.1)) as watch:
            assert not (await next_update(watch)).partitions
            for name in ("run-7/train", "run-8/train", "train"):
                await admin.put(name, rows(1), keys=[name])
            table = WatchedTable()
            await table.follow(watch, await now(admin))
            await admin.clear_partition("run-8/train")
            await admin.clear_partition("run-7/train")
            assert list(table.summaries) == ["run-7/train"]
            names = set()
            last = await now(admin)
            while watch.revision != last:
                names |= {each.partition_id for each in (await next_update(watch)).partitions}
            assert names == {"run-7/train"}
        async with watching(blind.watch()) as watch:
            with pytest.raises(tq.errors.PermissionDeniedError, match="Watch needs one of the roles"):
                await next_update(watch)
        for each in (admin, reader, blind):
            await each.aclose()


async def test_there_are_no_more_watches_than_allowed(kind):
    async with running(settings(max_watchers=1)) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        async with watching(client.watch()) as first, watching(client.watch()) as second:
            await next_update(first)
            with pytest.raises(tq.errors.LimitExceededError, match=r"max_watchers would be 2; expected at most 1"):
                await next_update(second)
        async with watching(client.watch()) as third:  # once the place is free again
            while True:
                try:
                    assert (await next_update(third)).is_reset
                    break
                except tq.errors.LimitExceededError:
                    await asyncio.sleep(0.01)
        await client.aclose()


async def test_a_server_that_drains_ends_its_watches(kind):
    async with running(settings()) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=0.3)
        watch = client.watch()
        assert (await next_update(watch)).is_reset
        await asyncio.wait_for(app.stop(grace_seconds=60), 30)
        with pytest.raises(tq.errors.UnavailableError, match="cannot reach"):
            while True:
                assert not (await next_update(watch)).partitions
        await client.aclose()
