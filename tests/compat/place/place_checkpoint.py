"""Checkpoints of a run: what the directory says, and what comes back in place of what is there."""

import json

import pytest
import torch
import transfer_queue as tq

import tq_service


def values():
    return tq.kv_list(), {key: tq.kv_batch_get(key, "train")["x"].tolist() for key in tq.kv_list("train")["train"]}


def test_a_checkpoint_comes_back_in_place_of_what_is_there(run, tmp_path):
    tq.kv_put("a", "train", fields={"x": torch.tensor(1)}, tag={"n": None})
    tq.kv_put("b", "train", fields={"x": torch.tensor(2)}, tag={"m": [1]})
    before = values()
    tq.save_checkpoint(tmp_path / "one", metadata={"step": 3})
    content = json.loads((tmp_path / "one" / "metadata.json").read_text())
    assert (content["user_metadata"], content["storage_saved"]) == ({"step": 3}, True)
    tq.kv_put("c", "train", fields={"x": torch.tensor(3)})
    tq.kv_put("d", "val", fields={"x": torch.tensor(4)})
    tq.kv_clear("a", "train")
    tq.load_checkpoint(str(tmp_path / "one"))
    assert values() == before
    tq.kv_clear("b", "train")
    tq.save_checkpoint(tmp_path / "one")
    tq.load_checkpoint(tmp_path / "one")
    assert tq.kv_list() == {"train": {"a": {"n": None}}}


def test_progress_of_tasks_is_in_it(run, tmp_path):
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], "train", fields=tensors(x=torch.arange(2)))
    client.get_meta(["x"], 1, "train", "fetch", "task")
    tq.save_checkpoint(tmp_path / "one")
    client.get_meta(["x"], 1, "train", "fetch", "task")
    tq.load_checkpoint(tmp_path / "one")
    assert client.get_consumption_status("task", "train")[1].tolist() == [1, 0]
    assert client.get_meta(["x"], 1, "train", "fetch", "task").global_indexes == [1]


def tensors(**fields):
    from tensordict import TensorDict

    return TensorDict(fields, batch_size=[2])


def test_it_is_of_the_run_and_another_run_may_load_it(service, tmp_path):
    def conf(name):
        return {"controller": {"address": service, "namespace": name}}

    with tq_service.Client(service) as client:
        tq.init(conf("first"))
        tq.kv_put("a", "train", fields={"x": torch.tensor(1)})
        client.put("of nobody", {"x": torch.ones(1)})
        tq.save_checkpoint(tmp_path / "one")
        tq.close()
        tq.init(conf("second"))
        tq.kv_put("b", "train", fields={"x": torch.tensor(2)})
        tq.load_checkpoint(tmp_path / "one")
        assert values()[1] == {"a": 1} or values()[1] == {"a": [1]}
        assert [each.partition_id for each in client.list_partitions()] == ["of nobody", "second/train"]
        client.clear_partition("of nobody")
    tq.close()


def test_the_service_writes_into_the_directory_where_it_can(service, tmp_path_factory, tmp_path):
    from tq_service.testing import ServiceProcess

    with ServiceProcess("--checkpoint-dir", str(tmp_path)) as own:
        tq.init({"controller": {"address": own.address, "checkpoint_dir": str(tmp_path)}})
        tq.kv_put("a", "train", fields={"x": torch.tensor(1)})
        tq.save_checkpoint(tmp_path / "step_1" / "transfer_queue")
        assert json.loads((tmp_path / "step_1/transfer_queue/metadata.json").read_text())["checkpoint"] == (
            "step_1/transfer_queue"
        )
        assert len(list((tmp_path / "step_1/transfer_queue").iterdir())) > 1
        tq.load_checkpoint(tmp_path / "step_1" / "transfer_queue")
        tq.close()


def test_what_is_not_there(run, tmp_path):
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "nothing")
    tq.close()
    for call in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(RuntimeError, match="call init"):
            call(tmp_path)


def test_a_service_without_a_directory_says_so(tmp_path):
    tq.init({"controller": {"service": {"max_bytes": "64MiB"}}})
    tq.kv_put("a", "train", tag={})
    tq.save_checkpoint(tmp_path / "one")  # that of a run has one: the root of the file system
    assert len(list((tmp_path / "one").iterdir())) > 1
    tq.close()
