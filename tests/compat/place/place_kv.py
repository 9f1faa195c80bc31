"""Puts, gets and lists by key: columns, tags, fields so far, what is not there. TransferQueue 0.1.11 answers so."""

import asyncio
import threading

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

import tq_service


def batch(size, **fields):
    return TensorDict(fields, batch_size=[size])


def jagged(*lengths):
    return torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


def rows(column):
    return [row.tolist() for row in column.unbind()]


def test_rows_come_nested_and_scalars_dense(kv):
    fields = batch(
        2,
        scalar=torch.tensor([1.0, 2.0]),
        row=torch.arange(6).reshape(2, 3),
        cube=torch.zeros(2, 4, 5),
        empty=torch.zeros(2, 0),
        ragged=jagged(3, 1),
        half=torch.ones(2, 2, dtype=torch.bfloat16),
    )
    kv.kv_batch_put(keys=["a", "b"], partition_id="train", fields=fields)
    got = kv.kv_batch_get(keys=["b", "a"], partition_id="train")
    assert got.batch_size == torch.Size([2])
    assert got["scalar"].tolist() == [2.0, 1.0]
    assert rows(got["row"]) == [[3, 4, 5], [0, 1, 2]]
    assert rows(got["ragged"]) == [[0], [0, 1, 2]]
    assert [tuple(row.shape) for row in got["cube"].unbind()] == [(4, 5), (4, 5)]
    assert [tuple(row.shape) for row in got["empty"].unbind()] == [(0,), (0,)]
    for name in ("row", "cube", "empty", "ragged", "half"):
        assert (got[name].is_nested, got[name].layout, got[name]._ragged_idx) == (True, torch.jagged, 1), name
    assert got["half"].dtype == torch.bfloat16
    assert got["ragged"].to_padded_tensor(0).shape == (2, 3)
    one = kv.kv_batch_get(keys="a", partition_id="train", select_fields="ragged")
    assert (list(one.keys()), rows(one["ragged"])) == (["ragged"], [[0, 1, 2]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_rows_ragged_in_other_dimensions(kv):
    positions = [torch.arange(4 * length).reshape(4, length) for length in (3, 5)]
    mixed = [torch.ones(2, 3), torch.ones(4, 5)]
    fields = batch(2, positions=torch.nested.nested_tensor(positions), mixed=torch.nested.nested_tensor(mixed))
    kv.kv_batch_put(keys=["a", "b"], partition_id="train", fields=fields)
    got = kv.kv_batch_get(keys=["a", "b"], partition_id="train")
    assert (got["positions"].layout, got["positions"]._ragged_idx) == (torch.jagged, 2)
    assert torch.equal(got["positions"].unbind()[1], positions[1])
    one = kv.kv_batch_get("b", "train")["positions"]
    assert (one._ragged_idx, torch.equal(one.unbind()[0], positions[1])) == (2, True)
    assert got["mixed"].is_nested
    assert [row.shape for row in got["mixed"].unbind()] == [row.shape for row in mixed]


def test_a_field_takes_rows_of_any_length_and_forgets_its_dtype_with_its_last_row(kv):
    for key, length in (("a", 2), ("b", 5)):
        kv.kv_put(key, "train", fields={"x": torch.ones(length)})
    assert rows(kv.kv_batch_get(["a", "b"], "train")["x"]) == [[1.0] * 2, [1.0] * 5]
    kv.kv_clear(["a", "b"], "train")
    kv.kv_put("c", "train", fields={"x": torch.arange(2)})
    assert rows(kv.kv_batch_get("c", "train")["x"]) == [[0, 1]]


def test_rows_of_one_length_are_ragged_where_the_field_is(kv):
    positions = [torch.arange(4 * length).reshape(4, length) for length in (5, 5, 7)]
    fields = batch(3, positions=torch.nested.as_nested_tensor(positions, layout=torch.jagged))
    kv.kv_batch_put(["a", "b", "c"], "train", fields=fields)
    for keys in (["a", "b"], ["c"], ["c", "a"]):
        got = kv.kv_batch_get(keys, "train")["positions"]
        assert got._ragged_idx == 2
        assert [row.tolist() for row in got.unbind()] == [positions["abc".index(key)].tolist() for key in keys]

    def parse(columns):
        columns["positions"][0] += 1

    kv.kv_batch_put(["d", "e"], "train", fields=kv.kv_batch_get(["a", "b"], "train"), data_parser=parse)
    got = kv.kv_batch_get(["d", "e"], "train")["positions"]
    assert (got._ragged_idx, got.unbind()[0].tolist()) == (2, (positions[0] + 1).tolist())


@pytest.mark.parametrize("form", ["dense", "scalar", "jagged", "ragged in another dimension", "strided"])
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (torch.float32, torch.int64), (torch.float32, torch.bfloat16), (torch.int64, torch.float32),
        (torch.bool, torch.int64), (torch.int64, torch.bool), (torch.float64, torch.float32),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_rows_of_another_dtype_become_those_of_the_field(kv, form, first, later):
    def column(dtype):
        shapes = {"dense": [(3,), (3,)], "scalar": [(), ()], "jagged": [(2,), (3,)], "strided": [(2, 1), (1, 3)]}
        rows = [torch.ones(shape, dtype=dtype) for shape in shapes.get(form, [(4, 2), (4, 3)])]
        if form in ("dense", "scalar"):
            return torch.stack(rows)
        layout = torch.strided if form == "strided" else torch.jagged
        return torch.nested.as_nested_tensor(rows, layout=layout)

    kv.kv_batch_put(["a", "b"], "train", fields=batch(2, x=column(first)))
    kv.kv_batch_put(["c", "d"], "train", fields=batch(2, x=column(later), y=torch.ones(2)))
    got = kv.kv_batch_get(["a", "b", "c", "d"], "train")["x"]
    assert got.dtype == first
    assert [row.tolist() for row in got.unbind()] == [row.tolist() for row in column(first).unbind()] * 2


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1.0, 0.5]])),
        (torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1.0, float("nan")]])),
        (torch.zeros(1, 2, dtype=torch.uint8), torch.tensor([[1, 256]])),
        (torch.zeros(1, 2, dtype=torch.bool), torch.tensor([[1, 2]])),
        (torch.zeros(1, 2), torch.tensor([[1, 2j]])),
        (torch.zeros(1, 2), torch.ones(1, 2, 2)),
        (torch.zeros(1, 2), NonTensorStack(None)),
    ],
)
def test_rows_that_a_field_cannot_hold_change_nothing(kv, first, later):
    kv.kv_batch_put(["a"], "train", fields=batch(1, x=first))
    with pytest.raises(tq_service.errors.FieldMismatchError, match="field 'x' is"):
        kv.kv_batch_put(["b"], "train", fields=batch(1, y=torch.ones(1), x=later), tags=[{"n": 1}])
    assert kv.kv_list() == {"train": {"a": {}}}
    assert list(kv.kv_batch_get("a", "train").keys()) == ["x"]


def test_objects_take_tensors(kv):
    kv.kv_batch_put(["a", "b"], "train", fields=batch(2, x=NonTensorStack(None, torch.ones(3))))
    kv.kv_batch_put(["c", "d"], "train", fields=batch(2, x=torch.zeros(2, 3)))
    kv.kv_put("e", "train", fields={"x": torch.zeros(2, 8)})
    assert kv.kv_batch_get(["a", "b"], "train").get("x").tolist()[0] is None
    assert rows(kv.kv_batch_get(["b", "c", "d"], "train")["x"]) == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    got = kv.kv_batch_get(["d", "e"], "train").get("x")
    assert [type(got), *(row.shape for row in got.tolist())] == [NonTensorStack, (3,), (2, 8)]


def test_objects_stay_objects(kv):
    objects = ["text", {"role": "user", "n": [1, None]}, None]
    numbers = [NonTensorStack(1, 0, 1), NonTensorStack(0.5, 1, 2), NonTensorStack(2, None, 3)]
    kv.kv_batch_put(["a", "b", "c"], "train", fields=batch(3, o=NonTensorStack(*objects), x=NonTensorData("all", [3])))
    for column in numbers:
        kv.kv_batch_put(["a", "b", "c"], "train", fields=batch(3, n=column))
        got = kv.kv_batch_get(["c", "a"], "train")
        assert isinstance(got.get("n"), NonTensorStack)
        assert got.get("n").tolist() == [column.tolist()[2], column.tolist()[0]]
    assert isinstance(got.get("o"), NonTensorStack)
    assert (got.get("o").tolist(), got.get("x").tolist()) == ([None, "text"], ["all", "all"])
    kv.kv_put("d", "train", fields={"o": [1, 2], "t": "text", "d": {"k": torch.arange(2)}, "s": torch.tensor(2.5)})
    got = kv.kv_batch_get("d", "train")
    assert (got.get("o").tolist(), got.get("t").tolist(), got["s"].tolist()) == ([[1, 2]], ["text"], [2.5])
    assert got.get("d").tolist()[0]["k"].tolist() == [0, 1]


def test_tags_are_any_json_and_merge(kv):
    first = kv.kv_batch_put(["a", "b"], "train", tags=[{"n": 1, "none": None}, {"n": [1, {"k": None}]}])
    assert first.tags == [{"n": 1, "none": None}, {"n": [1, {"k": None}]}]
    second = kv.kv_batch_put(["a", "c"], "train", tags=[{"n": "text now", "m": True}, {}])
    assert second.tags == [{"n": "text now", "none": None, "m": True}, {}]
    assert kv.kv_list("train") == {
        "train": {"a": {"n": "text now", "none": None, "m": True}, "b": {"n": [1, {"k": None}]}, "c": {}}
    }


def test_puts_answer_with_all_fields_that_all_samples_have_by_now(kv):
    assert kv.kv_put("a", "train", tag={"status": "pending"}).fields == []
    first = kv.kv_batch_put(["a", "b"], "train", fields=batch(2, y=torch.ones(2), x=torch.ones(2, 1)))
    assert (first.keys, first.partition_id, first.fields, first.extra_info) == (["a", "b"], "train", ["x", "y"], {})
    assert kv.kv_put("a", "train", fields={"z": torch.ones(1)}).fields == ["x", "y", "z"]
    assert kv.kv_batch_put(["a", "b"], "train", tags=[{}, {}]).fields == ["x", "y"]
    assert kv.kv_batch_put(["a", "c"], "train", fields=batch(2, w=torch.ones(2))).fields == ["w"]


def test_gets_have_the_fields_that_all_samples_have(kv):
    kv.kv_batch_put(["a", "b"], "train", fields=batch(2, x=torch.ones(2, 2), y=torch.zeros(2)))
    kv.kv_batch_put(["b", "c"], "train", fields=batch(2, z=torch.ones(2, 3)))
    kv.kv_put("d", "train", tag={})
    assert sorted(kv.kv_batch_get(["a", "b"], "train").keys()) == ["x", "y"]
    assert sorted(kv.kv_batch_get("b", "train").keys()) == ["x", "y", "z"]
    assert sorted(kv.kv_batch_get(["b", "c"], "train", select_fields=["z", "x", "nobody's"]).keys()) == ["z"]
    for nothing in (["nobody's"], []):
        assert kv.kv_batch_get("a", "train", select_fields=nothing).batch_size == torch.Size([0])
    for keys in (["a", "c"], ["a", "d"], "d"):
        for fields in (None, ["nobody's"]):
            with pytest.raises(ValueError, match="have no field in common"):
                kv.kv_batch_get(keys, "train", select_fields=fields)


def test_what_is_not_there(kv):
    assert kv.kv_list("nothing") == kv.kv_list() == {}
    kv.kv_clear(["a"], "nothing")
    with pytest.raises(ValueError, match="could not find the keys"):
        kv.kv_batch_get("a", "nothing")
    kv.kv_batch_put(["a", "c"], "train", fields=batch(2, x=torch.ones(2)))
    with pytest.raises(ValueError, match="could not find the keys"):
        kv.kv_batch_get("b", "train")
    assert kv.kv_batch_get(["b", "a"], "train")["x"].tolist() == [1.0]
    kv.kv_clear(["b", "c"], "train")
    assert kv.kv_list() == {"train": {"a": {}}}
    kv.kv_clear("a", "train")
    assert kv.kv_list("train") == {"train": {}}


def test_gets_by_meta(kv):
    meta = kv.kv_batch_put(["a", "b"], "train", fields=batch(2, x=torch.arange(2), y=torch.ones(2)))
    part = meta.chunk(2)[1]
    assert kv.kv_batch_get_by_meta(part)["x"].tolist() == [1]
    assert list(kv.kv_batch_get_by_meta(meta, select_fields="y").keys()) == ["y"]
    with pytest.raises(ValueError, match=r"select_fields contains \['z'\]"):
        kv.kv_batch_get_by_meta(meta, select_fields=["z"])
    with pytest.raises(ValueError, match="has no partition"):
        kv.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}]))


def test_a_parser_changes_columns_before_they_are_put(kv):
    def parse(columns):
        assert (type(columns["url"]), type(columns["r"]), columns["x"].tolist()) == (list, list, [1, 2])
        columns["url"][:] = [{"from": url} for url in columns["url"]]
        columns["r"][0] = torch.arange(4)
        columns["x"] += 1

    fields = batch(2, url=NonTensorStack("u", "v"), r=jagged(1, 2), x=torch.tensor([1, 2]))
    kv.kv_batch_put(["a", "b"], "train", fields=fields, data_parser=parse)
    got = kv.kv_batch_get(["a", "b"], "train")
    assert (got.get("url").tolist(), got["x"].tolist()) == ([{"from": "u"}, {"from": "v"}], [2, 3])
    assert [row.numel() for row in got["r"].unbind()] == [4, 2]
    with pytest.raises(ValueError, match="data_parser added or removed"):
        kv.kv_batch_put(["a", "b"], "train", fields=fields, data_parser=lambda columns: columns.pop("x"))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("kv_put", {"key": "a"}, "neither fields nor tags"),
        ("kv_put", {"key": "a", "fields": {"x": jagged(1, 2)}}, "kv_batch_put"),
        ("kv_put", {"key": "a", "fields": [1]}, "expected a dict or a TensorDict"),
        ("kv_batch_put", {"keys": []}, "keys is empty"),
        ("kv_batch_put", {"keys": ["a"]}, "neither fields nor tags"),
        ("kv_batch_put", {"keys": ["a"], "fields": batch(2, x=torch.ones(2))}, "fields has 2 rows; expected 1"),
        ("kv_batch_put", {"keys": ["a"], "tags": [{}, {}]}, "tags has 2 rows; expected 1"),
        ("kv_batch_put", {"keys": ["a", "a"], "tags": [{}, {}]}, "twice"),
        ("kv_batch_get", {"keys": []}, "keys is empty"),
    ],
)
def test_bad_calls_change_nothing(kv, name, arguments, error):
    with pytest.raises(ValueError, match=error):
        getattr(kv, name)(partition_id="train", **arguments)
    assert kv.kv_list() == {}


def test_keys_are_texts(kv):
    with pytest.raises(TypeError, match="expected a str or a list of str values"):
        kv.kv_batch_get([1], "train")


def test_one_client_in_several_loops_and_threads(run):
    failures = []

    async def use(name):
        await asyncio.gather(*(tq.async_kv_put(f"{name}{n}", "train", fields={"x": torch.tensor(n)}) for n in range(5)))
        assert (await tq.async_kv_batch_get([f"{name}{n}" for n in range(5)], "train"))["x"].tolist() == [0, 1, 2, 3, 4]

    def work(name):
        try:
            asyncio.run(use(name))
            tq.kv_put(name, "train", tag={})
        except BaseException as error:
            failures.append(error)

    async def while_another_loop_runs():
        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        await use("d")
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(while_another_loop_runs())
    assert failures == []
    assert len(tq.kv_list("train")["train"]) == 23
