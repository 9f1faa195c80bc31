"""The short forms of admissions and releases in `create_partition`."""

import pytest
from client_support import make_client

import tq_service as tq


async def test_short_forms_stand_for_their_objects(client):
    incarnation = await client.create_partition(
        "train", max_staleness=2, global_batch=4, batch_unit="group", clear_after=["actor"]
    )
    admission = tq.Admission("actor", max_staleness=2, global_batch=4, unit="group")
    release = tq.Release("trained", ["actor"])
    assert await client.create_partition("train", admissions=[admission], release=release) == incarnation
    found = await client.describe_partition("train")
    assert (found.admissions, found.release) == ((admission,), release)


async def test_a_release_of_several_tasks_needs_no_bound(client):
    limit = tq.Admission("reward", most=8)
    await client.create_partition("train", admissions=[limit], clear_after=["reward", "actor"])
    found = await client.describe_partition("train")
    assert (found.admissions, found.release) == ((limit,), tq.Release("trained", ["reward", "actor"]))


async def test_samples_are_trained_within_the_bound_and_cleared(client):
    await client.create_partition("train", max_staleness=0, global_batch=2, clear_after=["actor"])
    await client.publish_version(0)
    for version in range(3):
        slots = await client.acquire("train", "rollout", count=2, lease=30.0)
        assert (await client.acquire("train", "rollout", lease=30.0, max_wait=0.0)).status == "not_yet"
        await client.put(slots, {"response": [1, 2]}, ack=True)
        data, batch = await client.get_batch(
            "train", "actor", ["response"], batch_size=2, dp_rank=0, dp_size=1, batch_index=version
        )
        assert data["response"].tolist() == [1, 2]
        assert [row["start_version"] for row in batch.custom_meta] == [version] * 2
        await client.publish_version(version + 1, trained={("train", "actor"): version})
    found = await client.describe_partition("train")
    assert (found.released_count, found.summary.present_count) == (6, 0)


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"max_staleness": 2, "global_batch": 4}, "max_staleness", "clear_after has 0 tasks; expected exactly one"),
        (
            {"max_staleness": 2, "global_batch": 4, "clear_after": ["reward", "actor"]},
            "max_staleness",
            "clear_after has 2 tasks; expected exactly one",
        ),
        (
            {"max_staleness": 2, "clear_after": ["actor"]},
            "admissions",
            "max_staleness .* is 2, and global_batch is 0",
        ),
        ({"global_batch": 4, "clear_after": ["actor"]}, "global_batch", "global_batch is 4 without max_staleness"),
        ({"batch_unit": "group"}, "batch_unit", "batch_unit is 'group' without max_staleness"),
        ({"clear_after": ["actor"], "release": tq.Release("saved", ["actor"])}, "clear_after", "both set"),
        ({"clear_after": []}, "clear_after", "clear_after is empty"),
        ({"clear_after": "actor"}, "clear_after", "expected a list of strings"),
        ({"release": "trained"}, "release", "release: got a value of type str, expected type Release"),
    ],
)
async def test_an_incomplete_short_form_is_refused(kind, arguments, field, words):
    client = make_client(kind, "127.0.0.1:1", timeout=0.2)
    with pytest.raises(tq.errors.InvalidArgumentError, match=words) as raised:
        await client.create_partition("train", **arguments)
    await client.aclose()
    assert raised.value.field == field
