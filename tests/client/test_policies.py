"""Published versions and progress of trainers, through a real server, with both clients."""

import asyncio
import urllib.request

import pytest
import torch
from client_support import make_client

import tq_service as tq
from tq_service.cli.status import header_of
from tq_service.config import ServeSettings
from tq_service.server.app import running

CLAIM = {"partition_id": "p", "task_name": "train", "data_fields": ["x"], "batch_size": 1}
RANK = {**CLAIM, "dp_rank": 0, "dp_size": 1}


def put(client, *versions, **arguments):
    meta = [{"start_version": version} for version in versions]
    return client.put("p", {"x": torch.arange(len(versions))}, custom_meta=meta, **arguments)


async def explained(client):
    """Return why claims wait, once one does."""
    async with asyncio.timeout(20):
        while not (reasons := await client.explain("p")):  # noqa: ASYNC110  (another client's call)
            await asyncio.sleep(0.01)
    return reasons


async def test_a_version_is_what_was_published_last_and_goes_back_only_by_a_rewind(client):
    with pytest.raises(tq.errors.PolicyNotFoundError, match="'default'") as missing:
        await client.get_version()
    assert missing.value.metadata["policy"] == "default"
    await client.publish_version(3)
    await client.publish_version(3)
    assert await client.get_version() == 3
    with pytest.raises(tq.errors.VersionError, match="expected at least 3") as raised:
        await client.publish_version(2)
    assert (raised.value.metadata["got"], raised.value.metadata["expected"]) == ("2", "3")
    assert await client.get_version() == 3
    await client.publish_version(2, rewind=True)
    assert await client.get_version() == 2
    with pytest.raises(tq.errors.InvalidArgumentError) as negative:
        await client.publish_version(-1)
    assert negative.value.field == "version"


async def test_policies_are_apart_and_can_be_removed(client):
    await client.publish_version(7, policy="actor")
    await client.publish_version(1, policy="critic")
    assert [(each.policy, each.version) for each in (await client.status()).policies] == [("actor", 7), ("critic", 1)]
    assert await client.remove_policy("critic")
    with pytest.raises(tq.errors.PolicyNotFoundError, match=r"'critic'.*'actor'"):
        await client.get_version(policy="critic")
    with pytest.raises(tq.errors.PolicyNotFoundError):
        await client.remove_policy("critic")
    assert not await client.remove_policy("critic", missing_ok=True)
    await client.publish_version(0, policy="critic")
    assert await client.get_version(policy="critic") == 0


async def test_policies_are_named_in_the_namespace_of_their_client(kind, client, service):
    other = make_client(kind, service, timeout=20, namespace="run-7")
    await client.publish_version(1)
    with pytest.raises(tq.errors.PolicyNotFoundError) as missing:
        await other.get_version()
    assert missing.value.metadata["policy"] == "default"
    await other.publish_version(5)
    await put(other, 4, 5)
    where = [("start_version", ">=", tq.Published())]
    assert (await other.get_meta(**CLAIM, where=where, max_wait=0.0)).global_indexes == [1]
    assert [each.policy for each in (await other.status()).policies] == ["default"]
    assert await client.get_version(policy="run-7/default") == 5
    await other.aclose()


async def test_a_wait_for_a_version_ends_with_it_or_with_what_is_published(kind, client, service):
    other = make_client(kind, service, timeout=20)
    first = asyncio.ensure_future(other.get_version(at_least=2, max_wait=20.0))
    await asyncio.sleep(0.05)
    await client.publish_version(1)
    assert await client.get_version(at_least=2, max_wait=0.05) == 1
    assert not first.done()
    await client.publish_version(4)
    assert await first == 4
    with pytest.raises(tq.errors.PolicyNotFoundError):
        await client.get_version(policy="nobody", at_least=0, max_wait=0.05)
    await other.aclose()


async def test_a_wait_outlasts_what_the_service_lets_one_call_wait(kind):
    async with running(ServeSettings(host="127.0.0.1", port=0, max_wait_cap_seconds=0.05)) as app:
        client, other = (make_client(kind, f"127.0.0.1:{app.port}", timeout=20) for _ in range(2))
        waits = asyncio.ensure_future(other.get_version(at_least=1, max_wait=20.0))
        await asyncio.sleep(0.2)
        await client.publish_version(0)
        await asyncio.sleep(0.2)
        await client.publish_version(1)
        assert await waits == 1
        await client.aclose()
        await other.aclose()


async def test_a_batch_is_planned_once_its_version_is_published(kind, client, service):
    await put(client, 0, 0)
    not_yet = await client.get_meta(**RANK, batch_index=0, not_before_version=1, max_wait=0.0, explain=True)
    assert not_yet.status == "not_yet"
    assert not_yet.waiting_for.code == "VERSION_NOT_PUBLISHED"
    assert "'default', but no version is published" in not_yet.waiting_for.text
    other = make_client(kind, service, timeout=20)
    waits = asyncio.ensure_future(other.get_meta(**RANK, batch_index=0, not_before_version=1, max_wait=20.0))
    await client.publish_version(0)
    (reason,) = await explained(client)
    assert (reason.code, reason.waiting_count, reason.task_name) == ("VERSION_NOT_PUBLISHED", 1, "train")
    assert "waits for version 1 of policy 'default', but the published version is 0" in reason.text
    (wait,) = (await client.status()).waits
    assert wait.reason.code == "VERSION_NOT_PUBLISHED"
    (task,) = (await client.describe_partition("p")).tasks
    assert (task.task_name, task.waiting_count) == ("train", 1)
    await client.publish_version(1)
    assert (await waits).global_indexes == [0]
    await other.aclose()


async def test_a_claim_that_waits_for_a_version_ends_with_its_partition(kind, client, service):
    await put(client, 0)
    other = make_client(kind, service, timeout=20)
    waits = asyncio.ensure_future(other.get_meta(**RANK, batch_index=0, not_before_version=1, max_wait=20.0))
    await explained(client)
    await client.clear_partition("p")
    with pytest.raises(tq.errors.PartitionClearedError):
        await waits
    await other.aclose()


async def test_conditions_compare_with_the_version_of_the_moment_in_which_a_batch_is_planned(kind, client, service):
    await put(client, 0, 1, 2, 3)
    fresh = [("start_version", ">=", tq.Published(offset=-1))]
    assert (await client.get_meta(**CLAIM, where=fresh, max_wait=0.0)).status == "not_yet"  # nobody has published
    other = make_client(kind, service, timeout=20)
    waits = asyncio.ensure_future(other.get_meta(**CLAIM, where=fresh, max_wait=20.0))
    await client.publish_version(3)
    assert (await waits).global_indexes == [2]
    ahead = [("start_version", ">", tq.Published())]
    assert (await client.get_meta(**CLAIM, where=ahead, max_wait=0.0)).status == "not_yet"
    await client.publish_version(0, rewind=True)
    assert (await client.get_meta(**CLAIM, where=ahead, max_wait=0.0)).global_indexes == [1]
    await other.aclose()


async def test_ranks_share_the_version_with_which_their_batch_was_planned(client):
    await put(client, 0, 1, 2, 3)
    await client.publish_version(2)
    asks = {**CLAIM, "dp_size": 2, "batch_index": 0, "where": [("start_version", ">=", tq.Published(offset=-1))]}
    first = await client.get_meta(**asks, dp_rank=0, max_wait=0.0)
    await client.publish_version(9)
    second = await client.get_meta(**asks, dp_rank=1, max_wait=0.0)
    assert (first.global_indexes, second.global_indexes) == ([1], [2])
    with pytest.raises(tq.errors.RankDisagreementError, match=r"published\(default\) -1"):
        await client.get_meta(**{**asks, "where": [("start_version", ">=", 1)]}, dp_rank=1, max_wait=0.0)


async def test_samples_that_a_later_version_may_let_in_hold_the_end_back(client):
    await put(client, 0, 5)
    await client.seal_partition("p")
    await client.publish_version(3)
    late = [("start_version", "<=", tq.Published())]
    assert (await client.get_meta(**RANK, batch_index=0, where=late, max_wait=0.0)).global_indexes == [0]
    assert (await client.get_meta(**RANK, batch_index=1, where=late, max_wait=0.0)).status == "not_yet"
    await client.publish_version(5)
    assert (await client.get_meta(**RANK, batch_index=1, where=late, max_wait=0.0)).global_indexes == [1]
    stale = {**RANK, "task_name": "other", "where": [("start_version", ">=", tq.Published())]}
    assert (await client.get_meta(**stale, batch_index=0, max_wait=0.0)).global_indexes == [1]
    end = await client.get_meta(**stale, batch_index=1, max_wait=0.0)
    assert (end.status, end.end.excluded_count) == ("end", 1)


async def test_look_ups_and_clears_take_the_published_version(client):
    await put(client, 0, 1, 2)
    await client.publish_version(2)
    old = [("start_version", "<", tq.Published())]
    assert (await client.lookup_samples("p", where=old))[0].global_indexes == [0, 1]
    assert await client.clear_samples("p", where=old) == 2
    assert (await client.lookup_samples("p"))[0].global_indexes == [2]


@pytest.mark.parametrize("comparison", ["==", "!=", "in"])
async def test_a_published_version_is_compared_by_order_alone(client, comparison):
    await put(client, 0)
    with pytest.raises(tq.errors.InvalidArgumentError, match="one of the operators <, <=, > and >=") as raised:
        await client.get_meta(**CLAIM, where=[("start_version", comparison, tq.Published())], max_wait=0.0)
    assert raised.value.field == "where"


async def test_progress_only_grows_and_names_batches_that_were_planned(client):
    await put(client, 0, 0, 0)
    for index in range(3):
        await client.get_meta(**RANK, batch_index=index, max_wait=0.0)
    progress = await client.advance("p", "train", trained=1)
    assert (progress.trained_batch_count, progress.saved_batch_count, progress.planned_batch_count) == (2, 0, 3)
    progress = await client.advance("p", "train", trained=0, saved=1)
    assert (progress.trained_batch_count, progress.saved_batch_count) == (2, 2)
    for wrong in ({"trained": 3}, {"saved": -1}):
        with pytest.raises(tq.errors.InvalidArgumentError, match="expected 0 to 2") as raised:
            await client.advance("p", "train", **wrong)
        assert raised.value.field == next(iter(wrong))
    with pytest.raises(tq.errors.InvalidArgumentError, match="neither trained nor saved"):
        await client.advance("p", "train")
    with pytest.raises(tq.errors.TaskNotFoundError):
        await client.advance("p", "trian", trained=0)
    with pytest.raises(tq.errors.StaleEpochError):
        await client.advance("p", "train", trained=0, epoch=4)
    (task,) = (await client.describe_partition("p")).tasks
    assert (task.trained_batch_count, task.saved_batch_count) == (2, 2)
    await client.reset_consumption("p", "train")
    (task,) = (await client.describe_partition("p")).tasks
    assert (task.trained_batch_count, task.saved_batch_count) == (0, 0)


async def test_a_version_and_what_was_trained_for_it_are_one_change(client):
    await put(client, 0, 0)
    await client.get_meta(**RANK, batch_index=0, max_wait=0.0)
    await client.publish_version(1, trained={("p", "train"): 0})
    (task,) = (await client.describe_partition("p")).tasks
    assert (await client.get_version(), task.trained_batch_count) == (1, 1)
    with pytest.raises(tq.errors.InvalidArgumentError, match="trained is 1; expected 0 to 0"):
        await client.publish_version(2, trained={("p", "train"): 1})
    assert await client.get_version() == 1
    with pytest.raises(tq.errors.VersionError):
        await client.publish_version(0, trained={("p", "train"): 0})
    with pytest.raises(tq.errors.InvalidArgumentError, match="expected a mapping such as"):
        await client.publish_version(2, trained={"p": 0})


async def test_too_many_policies_are_refused(kind):
    async with running(ServeSettings(host="127.0.0.1", port=0, max_policies=1)) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await client.publish_version(1)
        with pytest.raises(tq.errors.LimitExceededError) as raised:
            await client.publish_version(1, policy="second")
        assert {"limit_name": "max_policies", "got": "2", "limit": "1"}.items() <= raised.value.metadata.items()
        await client.publish_version(2)
        await client.aclose()


async def test_versions_and_progress_outlive_the_process_and_are_in_checkpoints(kind, tmp_path):
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data", checkpoint_dir=tmp_path / "saved")
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await put(client, 0, 0)
        await client.get_meta(**RANK, batch_index=0, max_wait=0.0)
        await client.publish_version(4, trained={("p", "train"): 0})
        await client.publish_version(1, policy="gone")
        await client.checkpoint("first")
        await client.remove_policy("gone")
        await client.publish_version(5)
        await client.aclose()
    for _ in range(2):  # out of the journal, then out of the snapshot of the first start
        async with running(settings) as app:
            client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
            (task,) = (await client.describe_partition("p")).tasks
            assert task.trained_batch_count == 1
            assert [(each.policy, each.version) for each in (await client.status()).policies] == [("default", 5)]
            await client.aclose()
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        await client.restore("first", replace=True)
        found = [(each.policy, each.version) for each in (await client.status()).policies]
        assert found == [("default", 4), ("gone", 1)]
        await client.aclose()
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        assert await client.get_version() == 4
        await client.aclose()


async def test_a_put_waits_until_the_version_that_a_batch_made_is_published(kind, tmp_path):
    """In a namespace, over a restart, and from a checkpoint."""
    settings = ServeSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data", checkpoint_dir=tmp_path / "saved")

    def connect(app):
        return make_client(kind, f"127.0.0.1:{app.port}", timeout=20, namespace="run-7")

    async with running(settings) as app:
        client = connect(app)
        admission = tq.Admission("train", 2, given_back="published", policy="actor")
        await client.create_partition("p", admissions=[admission])
        assert (await client.describe_partition("p")).admissions == (admission,)
        await put(client, 0, 0)
        await client.get_meta(**RANK, batch_index=0, max_wait=0.0)
        with pytest.raises(tq.errors.AdmissionLimitError, match="1 of them delivered but not yet published") as raised:
            await put(client, 0, timeout=0.2)
        assert raised.value.metadata["unit"] == "sample"
        await client.advance("p", "train", trained=0)
        await client.checkpoint("here")
        await client.aclose()
    for start in ("recovered", "restored"):
        async with running(settings) as app:
            client = connect(app)
            if start == "restored":
                await client.restore("here", replace=True)
            (task,) = (await client.describe_partition("p")).tasks
            assert (task.outstanding_count, task.pending_count) == (2, 1)
            waits = asyncio.ensure_future(put(client, 0))
            while not (await client.describe_partition("p")).waiting_put_count:
                assert not waits.done()
            await client.publish_version(3, policy="another")
            assert (await client.describe_partition("p")).waiting_put_count == 1
            await client.publish_version(4, policy="actor")
            assert (await waits).size == 1
            await client.aclose()


async def test_versions_are_among_the_metrics_and_in_the_status(kind):
    async with running(ServeSettings(host="127.0.0.1", port=0, metrics_port=0)) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20)
        for number in range(9):
            await client.publish_version(number, policy=f"policy {number}")
        lines = header_of(await client.status(), "here")
        assert lines[-2].startswith("policy policy 7 at version 7, published ")
        assert lines[-1] == "1 other policies"
        url = f"http://127.0.0.1:{app.metrics.port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
        assert 'tq_service_policy_version{policy="policy 8"} 8.0' in page
        await client.aclose()
