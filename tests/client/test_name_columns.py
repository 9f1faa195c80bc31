"""Keys, groups and custom_meta as columns say what the same lists say."""

import pickle

import numpy as np
import pytest
import torch

import tq_service as tq
from tq_service.errors import AlreadyExistsError, InvalidArgumentError, KeyNotFoundError

COUNTS = [1, 3, 200]


def lists(count):
    """Return keys, groups and custom_meta of samples as lists; some text is no ASCII, some samples have no group."""
    keys = [f"kü{number}" if number % 5 == 0 else f"k{number}" for number in range(count)]
    groups = [None if number % 7 == 3 else f"g{number // 4}" for number in range(count)]
    rows = [
        {"length": number, "score": number / 2, "ok": number % 2 == 0, "tag": f"t{number // 3}"}
        for number in range(count)
    ]
    return {"keys": keys, "groups": groups, "custom_meta": rows}


def columns(given):
    names = given["custom_meta"][0]
    return {
        "keys": np.array(given["keys"]),
        "groups": np.array([group or "" for group in given["groups"]]),
        "custom_meta": {name: np.array([row[name] for row in given["custom_meta"]]) for name in names},
    }


def said(meta):
    return meta.keys, meta.groups, meta.custom_meta


@pytest.mark.parametrize("count", COUNTS)
async def test_columns_say_what_lists_say(client, count):
    given = lists(count)
    data = {"x": np.arange(count)}
    listed = await client.put("listed", data, **given)
    columnar = await client.put("columnar", data, **columns(given))
    inserted = await client.insert("inserted", **columns(given))
    expected = (given["keys"], given["groups"], given["custom_meta"])
    assert said(listed) == said(columnar) == said(inserted) == expected
    for partition_id in ("listed", "columnar", "inserted"):
        samples, missing = await client.lookup_samples(partition_id, given["keys"][::-1])
        assert (said(samples), missing) == (tuple(each[::-1] for each in expected), [])
        members, _ = await client.lookup_samples(partition_id, groups=["g0"])
        assert members.global_indexes == [number for number in range(min(count, 4)) if number % 7 != 3]


async def test_what_a_put_answers_is_a_batch_like_any_other(client):
    given = lists(200)
    meta = await client.put("p", {"x": np.arange(200)}, **columns(given))
    again = pickle.loads(pickle.dumps(meta))
    looked_up, _ = await client.lookup_samples("p", given["keys"])
    assert again == meta
    assert (meta.keys, meta.groups, meta.custom_meta) == (looked_up.keys, looked_up.groups, looked_up.custom_meta)
    chosen = meta.select_samples([150, 3, 0])
    assert said(chosen) == tuple([given[name][at] for at in (150, 3, 0)] for name in ("keys", "groups", "custom_meta"))
    joined = tq.BatchMeta.concat([chosen, meta.select_samples([7])])
    assert joined.keys == [given["keys"][at] for at in (150, 3, 0, 7)]


async def test_an_array_without_any_group_names_none(client):
    meta = await client.put("p", {"x": np.arange(100)}, groups=np.full(100, ""))
    assert meta.groups == [None] * 100


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1, 2, 3], np.uint8), [1, 2, 3]),
        (np.array([1, 2, 2**64 - 1], np.uint64), [1, 2, 2**64 - 1]),
        (np.array([1, 2, 3], ">i4"), [1, 2, 3]),
        (np.array([0.5, np.inf, -0.0], np.float16), [0.5, np.inf, -0.0]),
        (np.array([True, False, True]), [True, False, True]),
        (np.array(["a", "ü", ""]), ["a", "ü", ""]),
        (np.array(["a", 1, None], object), ["a", 1, None]),
        (np.array([[1, 2], [3, 4], [5, 6]]), [[1, 2], [3, 4], [5, 6]]),
        (torch.tensor([1, 2, 3], dtype=torch.int16), [1, 2, 3]),
        (torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16, requires_grad=True), [0.5, 1.5, 2.5]),
        ([1, 2.5, 3], [1.0, 2.5, 3.0]),
        (["a", None, "b"], ["a", None, "b"]),
        ((1, [2], {"three": None}), [1, [2], {"three": None}]),
        (range(3), [0, 1, 2]),
    ],
)
async def test_values_of_a_column_are_those_of_its_array(client, values, expected):
    meta = await client.put("p", {"x": np.arange(3)}, custom_meta={"c": values, "d": [7, 8, 9]})
    (found, _) = await client.lookup_samples("p")
    rows = [{"c": value, "d": 7 + at} if value is not None else {"d": 7 + at} for at, value in enumerate(expected)]
    assert found.custom_meta == meta.custom_meta == rows
    assert [[type(each) for each in row.values()] for row in found.custom_meta] == [
        [type(each) for each in row.values()] for row in rows
    ]


async def test_a_batch_does_not_change_with_the_arrays_it_was_put_with(client):
    values = np.arange(3)
    meta = await client.put("p", {"x": np.arange(3)}, custom_meta={"c": values})
    values[:] = 9
    assert meta.custom_meta == [{"c": 0}, {"c": 1}, {"c": 2}]


async def test_columns_merge_with_what_is_there(client):
    meta = await client.put("p", {"x": np.arange(100)}, custom_meta={"a": np.arange(100)})
    await client.set_custom_meta(meta, {"b": np.arange(100) / 4, "a": [None, *range(99)]})
    again = await client.put(meta, custom_meta={"c": np.full(100, "text")})
    (found, _) = await client.lookup_samples("p")
    assert found.custom_meta[0] == {"b": 0.0, "c": "text"}
    assert found.custom_meta[99] == {"a": 98, "b": 24.75, "c": "text"}
    assert again.custom_meta[99]["c"] == "text"


async def test_rows_may_be_counted_by_any_column(client):
    assert (await client.insert("p", keys=np.array(["a", "b"]))).size == 2
    assert (await client.insert("p", custom_meta={"n": torch.arange(3)})).size == 3
    assert (await client.insert("p", groups=np.array(["g"] * 100))).size == 100
    with pytest.raises(InvalidArgumentError, match="the put contains 0 samples"):
        await client.insert("p", custom_meta={})


WRONG = [
    ({"keys": np.array(["a", "b"])}, "keys", "keys has 2 values for 3 samples"),
    ({"keys": np.array([f"k{number}" for number in range(100)])}, "keys", "keys has 100 values for 3 samples"),
    ({"groups": np.array(["g"] * 100)}, "groups", "groups has 100 values for 3 samples"),
    ({"keys": np.arange(3)}, "keys", r"keys\[0\] is 0, expected a string"),
    ({"keys": np.array([b"a", b"b", b"c"])}, "keys", r"keys\[0\] is b'a', expected a string"),
    ({"keys": np.array(["a", "b", "\ud800"])}, "keys", r"keys\[2\] is '\\ud800', expected a string of valid Unicode"),
    ({"keys": np.array(["a"] * 99 + ["\ud800"])}, "keys", r"keys\[99\] is '\\ud800', expected a string"),
    ({"keys": np.array([["a"], ["b"], ["c"]])}, "keys", r"keys\[0\] is \['a'\], expected a string"),
    ({"keys": "abc"}, "keys", "keys is 'abc', expected a list of strings"),
    ({"keys": np.array(["a", "b", "a"])}, "keys", "key 'a' occurs twice in one put"),
    ({"keys": np.array(["a", "", "b"])}, "keys", "a key is empty"),
    ({"custom_meta": {"a": np.arange(3), "b": np.arange(2)}}, "custom_meta", r"custom_meta\['b'\] has 2 values"),
    ({"custom_meta": {"a": np.arange(2)}}, "custom_meta", r"custom_meta covers 2 sample\(s\), expected 3"),
    (
        {"custom_meta": {"a": 3}},
        "custom_meta",
        r"custom_meta\['a'\] has type int; expected an array, a tensor or a list",
    ),
    ({"custom_meta": {"a": np.array(3)}}, "custom_meta", r"custom_meta\['a'\] has type ndarray; expected"),
    ({"custom_meta": {"a": "xyz"}}, "custom_meta", r"custom_meta\['a'\] has type str; expected"),
    ({"custom_meta": {"": np.arange(3)}}, "custom_meta", "expected a non-empty string"),
    ({"custom_meta": {"a": np.array([1j, 2, 3])}}, "custom_meta", r"custom_meta\[0\]\['a'\] has type complex"),
    ({"custom_meta": {"a": np.array([b"x", b"y", b"z"])}}, "custom_meta", r"custom_meta\[0\]\['a'\] has type bytes"),
    (
        {"custom_meta": {"a": np.array(["x", "y", "\ud800"])}},
        "custom_meta",
        r"custom_meta column 'a'\[2\] is '\\ud800'",
    ),
]


@pytest.mark.parametrize(("given", "field", "message"), WRONG)
async def test_what_is_wrong_is_named_and_changes_nothing(client, given, field, message):
    await client.create_partition("p")
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        await client.put("p", {"x": np.arange(3)}, **given)
    assert caught.value.field == field
    assert (await client.describe_partition("p")).summary.inserted_count == 0


async def test_many_keys_are_looked_at_as_few_are(client):
    keys = np.array([f"prompt {number}" for number in range(1000)])
    await client.put("p", {"x": np.arange(1000)}, keys=keys)
    twice, empty = keys.copy(), keys.copy()
    twice[998], empty[5] = keys[3], ""
    for wrong, message in ((twice, "key 'prompt 3' occurs twice"), (empty, "a key is empty")):
        with pytest.raises(InvalidArgumentError, match=message):
            await client.put("p", {"x": np.arange(1000)}, keys=wrong)
    other = np.array(["new", *keys[1:].tolist()])
    with pytest.raises(KeyNotFoundError, match="has no key 'new'"):
        await client.put("p", {"x": np.arange(1000)}, keys=other, key_mode="existing")
    with pytest.raises(AlreadyExistsError, match="key 'prompt 1' already exists"):
        await client.put("p", {"x": np.arange(1000)}, keys=other, key_mode="new")
    meta = await client.put("p", {"x": -np.arange(1000)}, keys=other[::-1])
    assert meta.global_indexes == [*range(999, 0, -1), 1000]
    assert (await client.get_data("p", keys=["new", "prompt 0", "prompt 7"]))["x"].tolist() == [
        -999,
        0,
        -992,
    ]
