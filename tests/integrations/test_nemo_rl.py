"""NeMo-RL's data plane over a real service; NeMo-RL itself is represented by the signatures of its interface."""

import inspect
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tq_service as tq
from tq_service.testing import ServiceProcess

STUB = Path(__file__).parent / "nemo_rl_stub"
FIELDS = ["input_ids", "reward"]


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    sys.path.insert(0, str(STUB))
    try:
        from tq_service.integrations import nemo_rl

        yield nemo_rl
    finally:
        sys.path.remove(str(STUB))
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
            del sys.modules[name]
        sys.modules.pop("tq_service.integrations.nemo_rl", None)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with ServiceProcess("--checkpoint-dir", str(checkpoints)) as service:
        yield service.address


@pytest.fixture
def plane(adapter: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of a namespace of its own."""
    client = adapter.TqServiceDataPlaneClient({"controller_address": address, "namespace": request.node.name})
    yield client
    client.close()


def rows(lengths: list[int]) -> TensorDict:
    tensors = [torch.arange(length) for length in lengths]
    ids = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    return TensorDict({"input_ids": ids, "reward": torch.tensor(lengths, dtype=torch.float32)}, [len(lengths)])


def test_it_has_every_method_of_the_interface_as_it_is_called(adapter: Any) -> None:
    from nemo_rl.data_plane.interfaces import DataPlaneClient

    ours = adapter.TqServiceDataPlaneClient
    assert not inspect.isabstract(ours)
    for name in DataPlaneClient.__abstractmethods__:
        asked = inspect.signature(getattr(DataPlaneClient, name)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        assert [(each.name, each.kind, each.default) for each in given.values()] == [
            (each.name, each.kind, each.default) for each in asked.values()
        ]


def test_a_step(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 4, ["train", "prev_lp"])
    written = plane.put_samples(
        ["a", "b", "c", "d"], "train", rows([3, 5, 2, 4]), [{"input_lengths": n, "std": None} for n in (3, 5, 2, 4)]
    )
    assert written.sample_ids == ["a", "b", "c", "d"]
    assert written.fields == FIELDS
    assert not plane.check_consumption_status("train", ["train"])
    batch = plane.claim_meta("train", "train", FIELDS, 4)
    assert batch.sample_ids == ["a", "b", "c", "d"]
    assert batch.sequence_lengths == [3, 5, 2, 4]
    assert batch.tags[1] == {"input_lengths": 5, "std": None}
    assert batch.task_name == "train"
    data = plane.get_data(batch)
    assert [row.tolist() for row in data["input_ids"].unbind()] == [list(range(n)) for n in (3, 5, 2, 4)]
    # Rows of one length come dense, as NeMo-RL's codec wants them.
    assert plane.get_samples(["a"], "train", ["input_ids"])["input_ids"].tolist() == [[0, 1, 2]]
    assert plane.check_consumption_status("train", ["train"])
    assert not plane.check_consumption_status("train", ["train", "prev_lp"])
    plane.clear_samples(batch.sample_ids, "train")
    # The same partition again, its rows of another length and dtype than those that are gone.
    plane.register_partition("train", FIELDS, 2, ["train", "prev_lp"])
    plane.put_samples(["e", "f"], "train", TensorDict({"input_ids": torch.zeros(2, 7), "reward": torch.zeros(2)}, [2]))
    assert plane.get_samples(["f", "e"], "train", ["input_ids"])["input_ids"].shape == (2, 7)


def test_columns_are_added_under_the_same_ids(plane: Any) -> None:
    plane.put_samples(["a", "b"], "train", rows([1, 2]))
    plane.put_samples(["b", "a"], "train", TensorDict({"advantage": torch.tensor([2.0, 1.0])}, [2]))
    assert plane.get_samples(["a", "b"], "train", ["advantage"])["advantage"].tolist() == [1.0, 2.0]
    with pytest.raises(tq.TqError):
        plane.get_samples(["a"], "train", ["nothing"])


def test_a_task_that_was_not_registered_is_refused(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 4, ["train"])
    with pytest.raises(tq.errors.TaskNotFoundError, match="trian"):
        plane.claim_meta("train", "trian", FIELDS, 1, timeout_s=1.0)


def test_a_claim_waits_for_its_batch(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 2, ["train"])
    claimed: list[Any] = []
    waiting = threading.Thread(target=lambda: claimed.append(plane.claim_meta("train", "train", FIELDS, 2)))
    waiting.start()
    plane.put_samples(["a"], "train", rows([1]))
    plane.put_samples(["b"], "train", rows([2]))
    waiting.join(60)
    assert claimed[0].sample_ids == ["a", "b"]


def test_a_claim_that_does_not_wait_takes_what_is_there(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 2, ["train"])
    assert plane.claim_meta("train", "train", FIELDS, 2, blocking=False).sample_ids == []
    plane.put_samples(["a"], "train", rows([1]))
    assert plane.claim_meta("train", "train", FIELDS, 2, blocking=False).sample_ids == ["a"]
    with pytest.raises(
        TimeoutError, match=r"fields \['input_ids', 'reward'\] became ready for task 'train' within 0\.1 s"
    ):
        plane.claim_meta("train", "train", FIELDS, 2, timeout_s=0.1)


def test_enums_are_text_that_anything_else_is_refused_for(plane: Any) -> None:
    plane.register_partition("train", ["reward"], 2, ["train"], enums={"finish": ["stop", "length"]})
    plane.put_samples(["a", "b"], "train", TensorDict({"finish": NonTensorStack("stop", "length")}, [2]))
    assert list(plane.get_samples(["b", "a"], "train", ["finish"])["finish"]) == ["length", "stop"]
    with pytest.raises(tq.errors.FieldMismatchError):
        plane.put_samples(["a", "b"], "train", TensorDict({"finish": torch.zeros(2)}, [2]))


def test_clear_of_none_is_what_this_process_has_put_or_else_all(adapter: Any, plane: Any, address: str) -> None:
    other = adapter.TqServiceDataPlaneClient(
        {"controller_address": address, "namespace": "test_clear_of_none_is_what_this_process_has_put_or_else_all"},
        bootstrap=False,
    )
    plane.put_samples(["a"], "train", rows([1]))
    other.put_samples(["b", "c"], "train", rows([2, 3]))
    plane.clear_samples(None, "train")
    assert other.get_samples(["b", "c"], "train", ["reward"])["reward"].tolist() == [2.0, 3.0]
    plane.clear_samples(None, "train")  # it has put nothing that is left: all of the partition
    with pytest.warns(RuntimeWarning, match="found nothing to clear"):
        plane.clear_samples(None, "train")
    plane.clear_samples(["x"], "no such partition")
    other.close()
    other.close()


def test_ids_that_others_have_cleared_are_not_remembered_for_ever(
    adapter: Any, address: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_REMEMBERED_IDS", 4)
    settings = {"controller_address": address, "namespace": request.node.name}
    actor, driver = (adapter.TqServiceDataPlaneClient(settings) for _ in range(2))
    for step in range(8):
        ids = [f"{step}-{i}" for i in range(3)]
        actor.put_samples(ids, "train", rows([1, 2, 3]))
        assert len(actor._put_ids["train"]) <= 4 + 3
        if step < 7:
            driver.clear_samples(ids, "train")
    driver.put_samples(["d"], "train", rows([1]))
    actor.clear_samples(None, "train")  # those of it that are left
    assert driver.list_sample_ids("train") == ["d"]
    actor.close()
    driver.close()


def test_a_partition_with_samples_is_not_made_again(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 4, ["train"])
    plane.put_samples(["a"], "train", rows([1]))
    plane.register_partition("train", FIELDS, 8, ["train"])
    with pytest.raises(tq.errors.AlreadyExistsError):
        plane.register_partition("train", FIELDS, 4, ["train", "critic"])
    plane.clear_samples(["a"], "train")
    plane.register_partition("train", FIELDS, 4, ["train", "critic"])
    assert plane.check_consumption_status("train", ["critic"])


def test_a_partition_with_samples_takes_other_fields(plane: Any) -> None:
    plane.register_partition("train", FIELDS, 4, ["train"])
    plane.put_samples(["a"], "train", rows([1]))
    plane.register_partition("train", [*FIELDS, "advantage"], 4, ["train"])
    plane.put_samples(["a"], "train", TensorDict({"advantage": torch.tensor([0.5])}, [1]))
    assert plane.claim_meta("train", "train", [*FIELDS, "advantage"], 1).sample_ids == ["a"]


def test_the_ids_of_a_partition_are_listed_sorted_and_consume_nothing(plane: Any) -> None:
    assert plane.list_sample_ids("train") == []
    plane.register_partition("train", FIELDS, 3, ["train"])
    plane.put_samples(["group/b", "group/a", "c"], "train", rows([1, 2, 3]))
    assert plane.list_sample_ids("train") == ["c", "group/a", "group/b"]
    assert not plane.check_consumption_status("train", ["train"])
    plane.clear_samples(["c"], "train")
    assert plane.list_sample_ids("train") == ["group/a", "group/b"]


def test_object_arrays_come_back_as_objects(plane: Any) -> None:
    logs = np.empty(2, dtype=object)
    logs[:] = [[{"role": "user", "ids": torch.arange(2)}], [{"role": "user"}, {"role": "assistant"}]]
    plane.put_samples(["a", "b"], "train", TensorDict({"log": logs, "reward": torch.zeros(2)}, [2]))
    got = plane.get_samples(["b", "a"], "train", ["log"]).get("log").tolist()
    assert got[0] == [{"role": "user"}, {"role": "assistant"}]
    assert got[1][0]["ids"].tolist() == [0, 1]


def test_a_copy_in_another_process_is_a_client_of_the_same_partitions(plane: Any) -> None:
    # NeMo-RL's driver gives its client to a Ray actor.
    plane.put_samples(["a"], "train", rows([1]))
    other = pickle.loads(pickle.dumps(plane))
    other.put_samples(["b"], "train", rows([2]))
    other.clear_samples(None, "train")  # what that process has put
    assert plane.list_sample_ids("train") == ["a"]
    other.close()


def test_fields_must_be_named(adapter: Any, plane: Any) -> None:
    from nemo_rl.data_plane.interfaces import KVBatchMeta

    with pytest.raises(ValueError, match="list the fields"):
        plane.get_data(KVBatchMeta("train", None, ["a"]))
    assert plane.get_samples([], "train", ["reward"]).batch_size == (0,)


def test_a_checkpoint_brings_samples_consumption_and_metadata_back(
    adapter: Any, plane: Any, address: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plane.register_partition("train", FIELDS, 2, ["train"])
    plane.put_samples(["a", "b"], "train", rows([1, 2]))
    assert plane.claim_meta("train", "train", FIELDS, 1).sample_ids == ["a"]
    plane.save_checkpoint(tmp_path / "step_10", metadata={"step": 10})
    plane.clear_samples(None, "train")
    plane.put_samples(["c"], "train", rows([4]))
    resumed = adapter.TqServiceDataPlaneClient({"controller_address": address, "namespace": request.node.name})
    assert resumed.load_checkpoint(tmp_path / "step_10") == {"step": 10}
    assert resumed.get_samples(["a", "b"], "train", ["reward"])["reward"].tolist() == [1.0, 2.0]
    assert resumed.list_sample_ids("train") == ["a", "b"]
    assert resumed.claim_meta("train", "train", FIELDS, 2, timeout_s=0.1).sample_ids == ["b"]
    with pytest.raises(tq.errors.KeyNotFoundError):
        resumed.get_samples(["c"], "train", ["reward"])
    resumed.close()


def test_a_checkpoint_is_loaded_before_anything_else(plane: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plane.load_checkpoint(tmp_path / "step_11")
    plane.save_checkpoint(tmp_path / "step_0")
    assert plane.load_checkpoint(tmp_path / "step_0") == {}
    plane.register_partition("train", FIELDS, 2, ["train"])
    with pytest.raises(RuntimeError, match=r"needs an unused data-plane client.*load the checkpoint first"):
        plane.load_checkpoint(tmp_path / "step_0")
