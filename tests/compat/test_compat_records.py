from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from compat.differences import RAGGED, SCENE, TUPLES, compared_count, differences, records
from compat.plain_values import plain
from compat.recorder import CLIENT_CALLS, MODULE_CALLS, Recorder, builtin_name


class StrangeError(KeyError):
    pass


class Client:
    spoken = "as it is"

    def get_data(self, metadata: list[str]) -> int:
        return len(metadata)


def module_with(rows: dict[str, torch.Tensor], listed: list[str] | None = None) -> ModuleType:
    """Return a module with all calls, of which the first key-value ones do something."""
    module = ModuleType("transfer_queue")
    for name in MODULE_CALLS:
        setattr(module, name, lambda: None)

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        if any(key not in rows for key in keys):
            raise StrangeError(keys)
        return TensorDict({"x": torch.stack([rows[key] for key in keys])}, batch_size=[len(keys)])

    def kv_list(partition_id: str | None = None) -> dict[str, Any]:
        return {"train": {key: {} for key in listed or rows}}

    async def async_kv_put(key: str, partition_id: str, tag: dict[str, Any]) -> dict[str, Any]:
        return tag

    module.kv_batch_get, module.kv_list, module.async_kv_put = kv_batch_get, kv_list, async_kv_put
    module.get_client = Client
    return module


ROWS = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}


def recorded(directory: Path, module: ModuleType, role: str = "driver") -> ModuleType:
    Recorder(directory, lambda: role).install(module)
    return module


def found(left: Path, right: Path, concurrent: str = "agent") -> list[str]:
    return [str(d) for d in differences(records(left), records(right), concurrent=frozenset({concurrent}))]


def test_the_same_calls_do_not_differ(tmp_path: Path) -> None:
    for name in ("left", "right"):
        module = recorded(tmp_path / name, module_with(ROWS))
        module.kv_batch_get(["a", "b"], "train")
        with pytest.raises(StrangeError):
            module.kv_batch_get(keys=["nobody"], partition_id="train")
        assert module.get_client().get_data(["a"]) == 1
        assert module.get_client().spoken == "as it is"
    assert found(tmp_path / "left", tmp_path / "right") == []
    calls = [entry["call"] for entry in records(tmp_path / "left")["driver"]]
    assert calls == ["kv_batch_get", "kv_batch_get", "client.get_data"]
    assert records(tmp_path / "left")["driver"][1]["error"] == "KeyError"


def test_a_difference_names_call_key_and_field(tmp_path: Path) -> None:
    recorded(tmp_path / "left", module_with(ROWS)).kv_batch_get(["b", "a"], "train")
    other = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 5])}
    recorded(tmp_path / "right", module_with(other)).kv_batch_get(["b", "a"], "train")
    (text,) = found(tmp_path / "left", tmp_path / "right")
    assert "kv_batch_get(keys=['b', 'a']" in text
    assert "answer x" in text
    assert "[3, 4, 1, 2]" in text
    assert "[3, 5, 1, 2]" in text


def test_a_row_of_another_length_is_named_by_its_key(tmp_path: Path) -> None:
    for name, length in (("left", 2), ("right", 3)):
        rows = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(length)], layout=torch.jagged)
        module = module_with({})
        module.kv_batch_get = lambda keys, rows=rows: TensorDict({"y": rows}, batch_size=[2])
        recorded(tmp_path / name, module).kv_batch_get(keys=["a", "b"])
    (text,) = found(tmp_path / "left", tmp_path / "right")
    assert "answer y key 'b'" in text


def test_equal_rows_may_be_ragged_in_the_dimension_of_their_field(tmp_path: Path) -> None:
    rows = [torch.ones(4, 5), torch.zeros(4, 5)]
    first = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    second = torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), torch.tensor([0, 5, 10]), jagged_dim=2)
    for name, column in (("left", first), ("right", second)):
        module = module_with({})
        module.kv_batch_get = lambda keys, column=column: TensorDict({"y": column}, batch_size=[2])
        recorded(tmp_path / name, module).kv_batch_get(keys=["a", "b"])
    left, right = records(tmp_path / "left"), records(tmp_path / "right")
    assert [each.purpose for each in differences(left, right, concurrent=frozenset())] == [RAGGED]
    assert [each.purpose for each in differences(right, left, concurrent=frozenset())] == [""]


def test_an_error_instead_of_an_answer_differs(tmp_path: Path) -> None:
    recorded(tmp_path / "left", module_with(ROWS)).kv_batch_get(["a"], "train")
    with pytest.raises(StrangeError):
        recorded(tmp_path / "right", module_with({})).kv_batch_get(["a"], "train")
    assert any("'KeyError'" in text for text in found(tmp_path / "left", tmp_path / "right"))


def test_after_different_calls_nothing_more_is_compared(tmp_path: Path) -> None:
    left, right = recorded(tmp_path / "left", module_with(ROWS)), recorded(tmp_path / "right", module_with(ROWS))
    left.kv_batch_get(["a"], "train")
    right.kv_list()
    for module in (left, right):
        module.kv_batch_get(["b"], "train")
    (text,) = found(tmp_path / "left", tmp_path / "right")
    assert "the call" in text


async def test_concurrent_calls_are_compared_in_any_order(tmp_path: Path) -> None:
    for name, order in (("left", "ab"), ("right", "ba")):
        module = recorded(tmp_path / name, module_with(ROWS), "agent")
        for key in order:
            await module.async_kv_put(key, "train", tag={"status": "running"})
    assert found(tmp_path / "left", tmp_path / "right") == []
    assert found(tmp_path / "left", tmp_path / "right", concurrent="driver")


def test_polls_count_once_and_come_sorted(tmp_path: Path) -> None:
    for name, polls in (("left", 1), ("right", 3)):
        module = recorded(tmp_path / name, module_with(ROWS, listed=["b", "a"]))
        for _ in range(polls):
            assert list(module.kv_list()["train"]) == ["a", "b"]
        module.kv_batch_get(["a"], "train")
    assert found(tmp_path / "left", tmp_path / "right") == []
    assert compared_count(records(tmp_path / "right")) == 2


def test_what_a_killed_process_wrote_last_is_left_out(tmp_path: Path) -> None:
    module = recorded(tmp_path, module_with(ROWS))
    module.kv_batch_get(["a"], "train")
    module.kv_batch_get(["b"], "train")
    (path,) = tmp_path.glob("*.msgpack")
    path.write_bytes(path.read_bytes()[:-1])
    assert len(records(tmp_path)["driver"]) == 1


def test_arguments_are_as_they_were_given(tmp_path: Path) -> None:
    module = module_with({})
    module.kv_batch_put = lambda keys: keys.clear()
    recorded(tmp_path, module).kv_batch_put(["a"])
    assert records(tmp_path)["driver"][0]["given"] == {"kind": "dict", "items": {"keys": ["a"]}}


def test_watchers_see_a_call_before_it_is_made(tmp_path: Path) -> None:
    recorder, seen = Recorder(tmp_path, lambda: "driver"), []
    recorder.watch(lambda name, given: seen.append((name, given["keys"])))
    module = module_with({})
    recorder.install(module)
    with pytest.raises(StrangeError):
        module.kv_batch_get(["a"], "train")
    assert seen == [("kv_batch_get", ["a"])]


def test_what_differs_on_purpose_says_so(tmp_path: Path) -> None:
    for name, rows in (("left", ROWS), ("right", {**ROWS, "a": torch.tensor([0, 0])})):
        recorder = Recorder(tmp_path / name, lambda: "driver")
        module = module_with(rows)
        recorder.install(module)
        for purpose in ("better so", ""):
            recorder.note(f"{SCENE}of tests", plain({"purpose": purpose}))
            module.kv_batch_get(["a"], "train")
    found = differences(records(tmp_path / "left"), records(tmp_path / "right"), concurrent=frozenset())
    assert [difference.purpose for difference in found] == ["better so", ""]


def test_tuples_in_place_of_lists_are_on_purpose(tmp_path: Path) -> None:
    for name, rows in (("left", [[1, {"b": [2]}], [3]]), ("right", [(1, {"b": (2,)}), (4,)])):
        module = module_with({})
        module.kv_batch_get = lambda keys, rows=rows: rows
        recorded(tmp_path / name, module).kv_batch_get(["a", "b"])
    found = differences(records(tmp_path / "left"), records(tmp_path / "right"), concurrent=frozenset())
    assert [difference.purpose for difference in found] == [TUPLES, ""]


def test_indexes_are_counted(tmp_path: Path) -> None:
    module = module_with({})
    module.kv_batch_put = lambda global_indexes: None
    recorded(tmp_path, module).kv_batch_put([3, 7])
    assert records(tmp_path)["driver"][0]["given"]["items"] == {"global_indexes": 2}


def test_errors_count_by_what_a_caller_can_catch() -> None:
    assert builtin_name(StrangeError()) == "KeyError"
    assert builtin_name(ValueError()) == "ValueError"
    assert len(set(CLIENT_CALLS)) == len(CLIENT_CALLS)
