"""The values: parts and unions of batches, what is known of them, and their way to other processes."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import BatchMeta, KVBatchMeta


def batch(size=5, first=10, partition="train", **more):
    schema = {"x": {"dtype": torch.int64, "shape": (3,)}, "y": {"dtype": torch.float32, "shape": ()}}
    return BatchMeta(
        range(first, first + size),
        [partition] * size,
        schema,
        np.ones(size, np.int8),
        custom_meta=[{"n": n} for n in range(first, first + size)],
        **more,
    )


def keyed(size=5, **more):
    keys = [f"k{n}" for n in range(size)]
    return KVBatchMeta(keys=keys, tags=[{"n": n} for n in range(size)], partition_id="train", **more)


def test_what_is_known_of_a_batch():
    meta = batch(2, extra_info={"step": 1})
    assert (meta.size, len(meta), meta.field_names, meta.is_ready) == (2, 2, ["x", "y"], True)
    assert meta.get_dtypes("x") == [torch.int64] * 2
    assert meta.get_shapes("x") == [(3,), (3,)]
    with pytest.raises(KeyError, match="no field 'z'"):
        meta.get_shapes("z")
    view = meta.samples[1]
    assert (view.global_index, view.partition_id, view.production_status) == (11, "train", 1)
    assert (view.custom_meta["n"], view.fields["x"]["dtype"]) == (11, torch.int64)
    with pytest.raises(TypeError):
        view.custom_meta["n"] = 0
    assert str(meta).startswith("BatchMeta(size=2, field_names=['x', 'y'], is_ready=True")
    assert not BatchMeta().is_ready
    assert not BatchMeta.empty()


def test_lengths_have_to_agree():
    for wrong in ({"partition_ids": ["p"]}, {"production_status": [1]}, {"custom_meta": [{}]}):
        with pytest.raises(ValueError, match="has 1 values; expected 2"):
            BatchMeta(**{"global_indexes": [1, 2], "partition_ids": ["p", "p"], **wrong})


def test_extra_info_and_custom_meta_are_changed_in_place():
    meta = batch(2)
    meta.set_extra_info("a", 1)
    meta.update_extra_info({"b": [2]})
    copied = meta.get_all_extra_info()
    copied["b"].append(3)
    assert (meta.extra_info, meta.get_extra_info("c", 4), meta.has_extra_info("a")) == ({"a": 1, "b": [2]}, 4, True)
    assert meta.remove_extra_info("a") == 1
    meta.clear_extra_info()
    assert meta.extra_info == {}
    meta.update_custom_meta([{"n": 0, "m": None}, {}])
    meta.update_custom_meta(None)
    assert meta.get_all_custom_meta() == [{"n": 0, "m": None}, {"n": 11}]
    with pytest.raises(ValueError, match="has 1 values; expected 2"):
        meta.update_custom_meta([{}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]


def test_parts_and_their_order():
    meta = batch(5)
    assert [part.global_indexes for part in meta.chunk(3)] == [[10, 11], [12, 13], [14]]
    assert [part.size for part in batch(1).chunk(2)] == [1, 0]
    assert meta.select_samples([4, 0, 0]).custom_meta == [{"n": 14}, {"n": 10}, {"n": 10}]
    assert (meta[-1].global_indexes, meta[1:4:2].global_indexes) == ([14], [11, 13])
    assert meta.select_fields(["y", "nobody's"]).field_names == ["y"]
    for wrong in ([5], [-1]):
        with pytest.raises(ValueError, match="expected positions from 0 to 4"):
            meta.select_samples(wrong)
    with pytest.raises(IndexError):
        meta[5]
    with pytest.raises(TypeError, match="the index has type str"):
        meta["x"]
    meta.reorder(indices=[4, 3, 2, 1, 0])
    assert (meta.global_indexes[0], meta.custom_meta[0]) == (14, {"n": 14})
    for wrong in ([0, 1], [0, 0, 1, 2, 3], [1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match="each position from 0 to 4 exactly once"):
            meta.reorder(wrong)


def test_parts_do_not_share_what_is_changed():
    meta = batch(2, extra_info={"list": [1]})
    part = meta.select_samples([0])
    part.extra_info["list"].append(2)
    part.custom_meta[0]["n"] = 0
    part.field_schema["x"]["dtype"] = None
    assert (meta.extra_info, meta.custom_meta[0], meta.get_dtypes("x")[0]) == ({"list": [1]}, {"n": 10}, torch.int64)


def test_concat_takes_what_fits():
    parts = [batch(2, extra_info={"a": 1}), BatchMeta.empty(), batch(1, 20, "val", extra_info={"a": 1, "b": 2})]
    meta = BatchMeta.concat(parts)
    assert (meta.global_indexes, meta.partition_ids) == ([10, 11, 20], ["train", "train", "val"])
    assert (meta.extra_info, meta.is_ready) == ({"a": 1, "b": 2}, True)
    assert [part.global_indexes for part in meta.chunk_by_partition()] == [[10, 11], [20]]
    assert BatchMeta.concat([]).size == 0
    other = batch(1, 30)
    other.field_schema["x"] = {"dtype": torch.int32, "shape": (4,)}
    with pytest.raises(ValueError, match="dtypes for field 'x'"):
        BatchMeta.concat([batch(1), other])
    assert BatchMeta.concat([batch(1), other], validate=False).field_schema["x"]["shape"] == (-1,)
    with pytest.raises(ValueError, match="have different fields"):
        BatchMeta.concat([batch(1), batch(1, 30).select_fields(["x"])])
    with pytest.raises(ValueError, match="extra_info 'a'"):
        BatchMeta.concat([batch(1, extra_info={"a": torch.ones(2)}), batch(1, 30, extra_info={"a": torch.zeros(2)})])
    same = {"a": torch.ones(2), "b": np.arange(2)}
    assert set(BatchMeta.concat([batch(1, extra_info=same), batch(1, 30, extra_info=same)]).extra_info) == {"a", "b"}


def test_a_union_has_the_fields_of_both():
    one, other = batch(2).select_fields(["x"]), batch(2).select_fields(["y"])
    other.production_status[1] = 0
    other.update_custom_meta([{"m": 1}, {}])
    united = one.union(other)
    assert (united.field_names, united.production_status.tolist()) == (["x", "y"], [1, 0])
    assert united.custom_meta == [{"n": 10, "m": 1}, {"n": 11}]
    assert one.union(BatchMeta.empty()).field_names == ["x"]
    assert BatchMeta.empty().union(other).field_names == ["y"]
    for wrong, what in ((batch(2, 11), "global_indexes"), (batch(2, partition="val"), "partition_ids")):
        with pytest.raises(ValueError, match=rf"{what} is .* in the other batch"):
            one.union(wrong)


def test_fields_of_data_are_added():
    data = {
        "z": torch.ones(2, 4),
        "r": torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }
    meta = BatchMeta([1, 2], ["p", "p"]).add_fields(
        TensorDict({**data, "o": NonTensorStack("a", None)}, batch_size=[2])
    )
    assert (meta.field_names, meta.is_ready) == (["o", "r", "z"], True)
    assert [meta.get_shapes(name)[0] for name in meta.field_names] == [None, (-1,), (4,)]
    assert meta.field_schema["o"]["is_non_tensor"]
    assert meta.field_schema["r"]["is_nested"]
    with pytest.raises(ValueError, match="1 rows; expected 2"):
        meta.add_fields(TensorDict({"x": torch.ones(1)}, batch_size=[1]))


def test_keyed_batches():
    meta = keyed(fields=["x"], extra_info={"t": 1.0})
    assert [part.keys for part in meta.chunk(2)] == [["k0", "k1", "k2"], ["k3", "k4"]]
    joined = KVBatchMeta.concat([*meta.chunk(3), KVBatchMeta()])
    assert (joined.keys, joined.tags, joined.extra_info, joined.fields) == (meta.keys, meta.tags, {"t": 1.0}, ["x"])
    joined.reorder(indexes=[4, 3, 2, 1, 0])
    assert (joined.keys[0], joined.tags[0]) == ("k4", {"n": 4})
    chosen = meta.select_keys(["k3", "k1"])
    chosen.tags[0]["n"] = 0
    assert (chosen.keys, meta.tags[3], chosen.partition_id) == (["k3", "k1"], {"n": 3}, "train")
    assert str(chosen) == "KVBatchMeta(size=2, field_names=['x'], extra_info={'t': 1.0})"
    assert (KVBatchMeta.concat([]).size, len(meta), meta.size) == (0, 5, 5)
    assert KVBatchMeta.concat([keyed(1)]).extra_info is None


def test_keyed_batches_that_cannot_be():
    with pytest.raises(ValueError, match="1 keys and 0 tags"):
        KVBatchMeta(keys=["a"])
    with pytest.raises(ValueError, match="keys contains duplicate names"):
        KVBatchMeta(keys=["a", "a"], tags=[{}, {}])
    with pytest.raises(ValueError, match="fields contains duplicate names"):
        keyed(fields=["x", "x"])
    with pytest.raises(RuntimeError, match="contains no samples with the keys"):
        keyed().select_keys(["k9"])
    with pytest.raises(ValueError, match="keys contains duplicate names"):
        keyed().select_keys(["k1", "k1"])
    with pytest.raises(ValueError, match="each position from"):
        keyed().reorder([0])
    with pytest.raises(ValueError, match="different partitions"):
        KVBatchMeta.concat([keyed(1), KVBatchMeta(keys=["z"], tags=[{}], partition_id="val")])
    with pytest.raises(ValueError, match="have different fields"):
        KVBatchMeta.concat(
            [keyed(1, fields=["x"]), KVBatchMeta(keys=["z"], tags=[{}], partition_id="train", fields=["y"])]
        )


def test_they_travel_between_processes():
    meta = batch(3, extra_info={"t": torch.ones(2)}, incarnations={"train": b"1" * 16})
    copied = pickle.loads(pickle.dumps(meta))
    assert str(copied) == str(meta)
    assert copied.incarnations == meta.incarnations
    copied.production_status.setflags(write=False)  # as Ray has it
    assert copied.add_fields(TensorDict({"z": torch.ones(3)}, batch_size=[3])).is_ready
    assert copied.union(meta).is_ready
    kept = keyed(fields=["x"])
    assert pickle.loads(pickle.dumps(kept)) == kept
    assert type(copied).__module__ == type(kept).__module__ == "transfer_queue.metadata"
