"""The calls of the client: batches of tasks, data by index, progress, partitions."""

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

import tq_service


def batch(size, **fields):
    return TensorDict(fields, batch_size=[size])


def fetch(client, size=2, task="train", **more):
    return client.get_meta(data_fields=["x"], batch_size=size, partition_id="p", task_name=task, **more)


def test_put_claim_and_get(client):
    written = client.put(batch(4, x=torch.arange(8).reshape(4, 2)), partition_id="p")
    assert (written.size, written.field_names, written.is_ready) == (4, ["x"], True)
    assert written.partition_ids == ["p"] * 4
    first, second = fetch(client), fetch(client)
    assert first.global_indexes + second.global_indexes == written.global_indexes
    got = client.get_data(first)["x"]
    assert (got.is_nested, [row.tolist() for row in got.unbind()]) == (True, [[0, 1], [2, 3]])
    assert fetch(client).size == 0
    assert fetch(client, task="other", size=4).size == 4


def test_fields_are_added_to_samples(client):
    written = client.put(batch(3, x=torch.arange(3)), partition_id="p")
    part = written.select_samples([2, 0])
    part.extra_info["kept"] = 1
    again = client.put(batch(2, y=NonTensorStack("a", None)), metadata=part)
    assert again is part
    assert (again.field_names, again.extra_info) == (["x", "y"], {"kept": 1})
    got = client.get_data(again)
    assert (got["x"].tolist(), got.get("y").tolist()) == ([2, 0], ["a", None])
    assert client.get_data(again.select_fields(["x"]))["x"].tolist() == [2, 0]
    assert client.get_data(tq.BatchMeta.empty()).batch_size == torch.Size([0])
    with pytest.raises(ValueError, match="metadata contains no samples"):
        client.put(batch(2, y=torch.ones(2)), metadata=tq.BatchMeta.empty())
    with pytest.raises(ValueError, match="neither metadata nor partition_id"):
        client.put(batch(2, y=torch.ones(2)))


def test_custom_meta_goes_with_puts_and_by_itself(client):
    written = client.put(batch(2, x=torch.arange(2)), partition_id="p")
    written.update_custom_meta([{"n": 1, "none": None}, {}])
    client.put(batch(2, y=torch.ones(2)), metadata=written)
    written.update_custom_meta([{"n": 2}, {"l": [1]}])
    client.set_custom_meta(written)
    assert fetch(client).custom_meta == [{"n": 2, "none": None}, {"l": [1]}]


def test_batches_of_several_partitions(client):
    metas = [client.put(batch(2, x=torch.arange(2) + 10 * n), partition_id=f"p{n}") for n in range(2)]
    both = tq.BatchMeta.concat(metas).select_samples([3, 0, 2, 1])
    assert client.get_data(both)["x"].tolist() == [11, 0, 10, 1]
    fields = batch(4, r=torch.nested.as_nested_tensor([torch.ones(n) for n in range(4)], layout=torch.jagged))
    client.put(fields, metadata=both)
    got = client.get_data(both)
    assert [row.numel() for row in got["r"].unbind()] == [0, 1, 2, 3]
    assert got["x"].tolist() == [11, 0, 10, 1]
    client.clear_samples(both)
    assert client.get_meta(data_fields=["x"], batch_size=1, partition_id="p1", mode="force_fetch").size == 0


@pytest.mark.parametrize("cleared_count", [1, 3, 4])
def test_data_of_samples_that_were_cleared(client, cleared_count):
    client.put(batch(4, x=torch.arange(4)), partition_id="p")
    meta = fetch(client, size=4)
    client.clear_samples(meta.select_samples(range(cleared_count)))
    with pytest.raises(tq.StorageKeyNotFoundError, match=r"cleared"):
        client.get_data(meta)


def test_a_field_that_no_sample_has_is_not_taken_for_a_cleared_one(client):
    client.put(batch(2, x=torch.arange(2)), partition_id="p")
    everything = client.get_meta(data_fields=["x", "typo"], batch_size=1, partition_id="p", mode="force_fetch")
    with pytest.raises(tq_service.errors.FieldNotFoundError, match="no field 'typo'"):
        client.get_data(everything)


def test_a_put_with_metadata_takes_rows_of_another_dtype(client):
    written = client.put(batch(2, x=torch.zeros(2)), partition_id="p")
    client.put(batch(1, x=torch.tensor([3])), partition_id="p")
    client.put(batch(1, x=torch.tensor([4])), metadata=written.select_samples([0]))
    got = client.get_data(client.get_meta(["x"], 1, "p", mode="force_fetch"))["x"]
    assert (got.dtype, got.tolist()) == (torch.float32, [4.0, 0.0, 3.0])


def test_each_client_has_a_name(run):
    assert tq.get_client().client_id.startswith("TransferQueueClient_")


def test_batches_of_several_partitions_stay_ragged_where_they_are(client):
    positions = [torch.arange(4 * length).reshape(4, length) for length in (2, 3, 2, 3)]
    metas = [
        client.put(batch(2, x=torch.nested.as_nested_tensor(part, layout=torch.jagged)), partition_id=f"p{n}")
        for n, part in enumerate([positions[:2], positions[2:]])
    ]
    alike = tq.BatchMeta.concat(metas).select_samples([3, 1])
    got = client.get_data(alike)["x"]
    assert (got._ragged_idx, [row.tolist() for row in got.unbind()]) == (2, [positions[3].tolist()] * 2)
    client.put(batch(2, x=got), metadata=alike)
    assert client.get_data(alike)["x"]._ragged_idx == 2


def test_rows_before_their_data(client):
    made = client.get_meta(data_fields=["x"], batch_size=2, partition_id="p", mode="insert")
    assert (made.size, made.field_names, made.is_ready) == (2, ["x"], False)
    assert not client.check_production_status(["x"], "p")
    client.put(batch(2, x=torch.arange(2)), metadata=made)
    assert client.check_production_status(["x"], "p")
    everything = client.get_meta(data_fields=["x", "y"], batch_size=1, partition_id="p", mode="force_fetch")
    assert (everything.size, everything.is_ready) == (2, False)
    with pytest.raises(ValueError, match="mode is 'other'"):
        fetch(client, mode="other")


def test_progress_of_each_sample(client):
    assert client.get_consumption_status("train", "p") == (None, None)
    assert client.get_production_status(["x"], "p") == (None, None)
    assert not client.check_consumption_status("train", "p")
    written = client.put(batch(3, x=torch.arange(3)), partition_id="p")
    client.put(batch(1, y=torch.ones(1)), metadata=written.select_samples([1]))
    claimed = fetch(client)
    indexes, consumed = client.get_consumption_status("train", "p")
    assert (indexes.tolist(), consumed.tolist(), consumed.dtype) == (written.global_indexes, [1, 1, 0], torch.int8)
    assert client.get_consumption_status("other", "p")[1].tolist() == [0, 0, 0]
    assert client.get_production_status(["x", "y"], "p")[1].tolist() == [[1, 0], [1, 1], [1, 0]]
    assert client.get_production_status(["x", "z"], "p") == (None, None)
    assert (client.check_production_status(["x"], "p"), client.check_production_status(["y"], "p")) == (True, False)
    assert not client.check_consumption_status("train", "p")
    fetch(client, size=1)
    assert client.check_consumption_status("train", "p")
    assert client.reset_consumption("p", "train")
    assert fetch(client).global_indexes == claimed.global_indexes
    assert client.reset_consumption("p")
    assert client.get_consumption_status("train", "p")[1].tolist() == [0, 0, 0]
    assert client.reset_consumption("nothing", "train")
    assert client.reset_consumption("p", "nobody")


def test_samples_that_were_cleared_need_not_be_consumed(client):
    # NeMo-RL makes its fields known by a sample that it clears at once.
    tq.kv_put("schema", "p", fields={"x": torch.zeros(1)}, tag={})
    tq.kv_clear(["schema"], "p")
    assert not client.check_consumption_status("train", "p")
    client.put(batch(2, x=torch.arange(2)), partition_id="p")
    fetch(client, size=1)
    assert not client.check_consumption_status("train", "p")
    fetch(client, size=1)
    assert client.check_consumption_status("train", "p")


def test_a_row_of_a_one_dimensional_field_is_a_scalar(client):
    # What NeMo-RL's adapter mends in TransferQueue's own schema, and does not look for here.
    assert tq.metadata._nrl_scalar_schema_patched
    assert client.put(batch(2, x=torch.arange(2)), partition_id="p").field_schema["x"]["shape"] == ()


def test_samples_that_are_expected_are_not_yet_produced(client, monkeypatch):
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "4")
    client.put(batch(2, x=torch.arange(2)), partition_id="p")
    fetch(client)
    assert not client.check_production_status(["x"], "p")
    assert not client.check_consumption_status("train", "p")


def test_keys_and_indexes(client):
    tq.kv_batch_put(["a", "b"], "p", fields=batch(2, x=torch.arange(2)), tags=[{"n": 1}, {}])
    meta = client.kv_retrieve_meta(["b", "nobody", "a"], "p")
    assert (client.kv_retrieve_keys(meta.global_indexes, "p"), meta.custom_meta) == (["b", "a"], [{}, {"n": 1}])
    assert client.kv_retrieve_keys([99], "p") == [None]
    made = client.kv_retrieve_meta(["a", "new"], "p", create=True)
    assert (made.field_names, made.is_ready) == ([], False)
    assert client.kv_retrieve_keys(made.global_indexes, "p") == ["a", "new"]
    assert client.kv_retrieve_meta("a", "nothing").size == 0
    with pytest.raises(RuntimeError, match="partition 'nothing' does not exist"):
        client.kv_retrieve_keys(0, "nothing")
    with pytest.raises(TypeError, match="expected a int or a list"):
        client.kv_retrieve_keys("a", "p")


def test_partitions(client):
    written = client.put(batch(2, x=torch.arange(2)), partition_id="p")
    client.put(batch(1, x=torch.arange(1)), partition_id="q")
    assert client.get_partition_list() == ["p", "q"]
    client.clear_samples(written.select_samples([0]))
    with pytest.raises(tq.StorageKeyNotFoundError, match="has no sample 0"):
        client.get_data(written)
    assert client.get_data(written[1])["x"].tolist() == [1]
    client.clear_samples(written)
    client.clear_partition("p")
    client.clear_partition("p")
    client.clear_samples(written)
    assert client.get_partition_list() == ["q"]
    client.put(batch(2, x=torch.arange(2)), partition_id="p")
    with pytest.raises(tq.StorageKeyNotFoundError, match="incarnation"):
        client.get_data(written)
    with pytest.raises(RuntimeError, match="incarnation"):
        client.put(batch(2, x=torch.arange(2)), written)


def test_too_few_samples_are_an_error_unless_polled(service):
    tq.close()
    tq.init({"controller": {"address": service, "namespace": "patient", "wait_seconds": 0.05}})
    with pytest.raises(RuntimeError, match=r"fewer than 2 samples of partition 'p' were ready for task 'train' within"):
        fetch(tq.get_client())
    tq.close()
