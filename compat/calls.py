"""Each call of TransferQueue's interface, in the cases that its users meet, in one process.

Runs in an environment where `transfer_queue` is one of the two systems; `compat.recorder` records the answers. Each
scene has its own partition.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from compat.differences import SCENE
from compat.plain_values import plain
from compat.recorder import Recorder

Scene = Callable[[Any, str], None]
_SCENES: list[tuple[Scene, str]] = []


def _scene(function: Scene) -> Scene:
    _SCENES.append((function, ""))
    return function


def _differs(purpose: str) -> Callable[[Scene], Scene]:
    """Mark a scene whose answers differ on purpose, and give the reason."""

    def mark(function: Scene) -> Scene:
        _SCENES.append((function, purpose))
        return function

    return mark


_IN_VAIN = "a put that fails creates no samples; TransferQueue leaves empty ones"


def _try(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the answer of a call, or None if it raises: the recorder has both."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return None


def _batch(size: int, **fields: Any) -> TensorDict:
    return TensorDict(fields, batch_size=[size])


def _jagged(*rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _rows(*lengths: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return _jagged(*(torch.arange(length).to(dtype) + length for length in lengths))


@_scene
def _one_key(tq: Any, partition: str) -> None:
    _try(tq.kv_put, "a", partition, fields={"x": torch.arange(3), "y": torch.tensor(2.5)}, tag={"n": 1})
    _try(tq.kv_put, "a", partition, tag={"m": None, "n": [1, {"k": 2}]})
    _try(tq.kv_put, "b", partition, tag={"status": "running"})
    _try(tq.kv_put, "b", partition, fields={"x": torch.arange(5)})
    _try(tq.kv_put, "d", partition, fields=_batch(1, x=torch.arange(4).unsqueeze(0)), tag={})
    _try(tq.kv_batch_get, "a", partition)
    _try(tq.kv_batch_get, ["a", "b"], partition, select_fields="x")
    _try(tq.kv_batch_get, ["b", "a"], partition)
    _try(tq.kv_list, partition)
    _try(tq.kv_clear, "a", partition)
    _try(tq.kv_list, partition)


@_differs(_IN_VAIN)
def _one_key_in_vain(tq: Any, partition: str) -> None:
    _try(tq.kv_put, "c", partition)
    _try(tq.kv_put, "c", partition, fields={"x": _rows(2, 3)})
    _try(tq.kv_put, "d", partition, fields=[1, 2])
    _try(tq.kv_list, partition)


@_scene
def _tensors_of_all_kinds(tq: Any, partition: str) -> None:
    keys = ["a", "b", "c"]
    kinds = {
        "scalars": torch.tensor([1, 2, 3]),
        "one": torch.tensor([[1.0], [2.0], [3.0]]),
        "rows": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "cubes": torch.arange(24, dtype=torch.float64).reshape(3, 2, 4),
        "jagged": _rows(2, 5, 1),
        "jagged_alike": _rows(4, 4, 4, dtype=torch.float32),
        "jagged_some_empty": _rows(0, 3, 0, dtype=torch.float32),
        "half": torch.linspace(0, 1, 9, dtype=torch.float16).reshape(3, 3),
        "bfloat": torch.linspace(0, 1, 9, dtype=torch.bfloat16).reshape(3, 3),
        "flags": torch.tensor([[True, False], [False, False], [True, True]]),
        "bytes": torch.arange(6, dtype=torch.uint8).reshape(3, 2),
        "short": torch.arange(6, dtype=torch.int16).reshape(3, 2),
        "empty": torch.zeros(3, 0),
        "specials": torch.tensor([[float("nan"), -0.0], [float("inf"), 0.0], [1e-45, -1.0]]),
    }
    _try(tq.kv_batch_put, keys, partition, fields=_batch(3, **kinds))
    _try(tq.kv_batch_get, keys, partition)
    for name in kinds:
        _try(tq.kv_batch_get, keys, partition, select_fields=[name])
        _try(tq.kv_batch_get, "b", partition, select_fields=name)
    _try(tq.kv_batch_get, ["c", "a"], partition, select_fields=["jagged", "rows"])


@_scene
def _ragged_in_other_dimensions(tq: Any, partition: str) -> None:
    positions = [torch.arange(4 * length).reshape(4, length) for length in (3, 5, 2)]
    strided = torch.nested.nested_tensor(positions)
    ragged = torch.nested.nested_tensor([row.float() for row in positions], layout=torch.strided)
    wide = torch.nested.nested_tensor_from_jagged(
        torch.cat(positions, dim=-1), offsets=torch.tensor([0, 3, 8, 10]), jagged_dim=2
    )
    tall = _jagged(*(torch.ones(length, 2) * length for length in (1, 4, 2)))
    for name, column in {"strided": strided, "float": ragged, "wide": wide, "tall": tall}.items():
        _try(tq.kv_batch_put, ["a", "b", "c"], partition, fields=_batch(3, **{name: column}))
        _try(tq.kv_batch_get, ["a", "b", "c"], partition, select_fields=[name])
        _try(tq.kv_batch_get, ["b"], partition, select_fields=[name])
    mixed = {f"k{n}": torch.ones(*shape) for n, shape in enumerate([(2, 3), (4, 3), (2, 5)])}
    for key, row in mixed.items():
        _try(tq.kv_put, key, partition, fields={"mixed": row})
    _try(tq.kv_batch_get, list(mixed), partition, select_fields=["mixed"])
    _try(tq.kv_batch_get, ["k0", "k1"], partition, select_fields=["mixed"])
    _try(tq.kv_batch_get, ["k0", "k2"], partition, select_fields=["mixed"])


@_scene
def _rows_that_change(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(2, x=torch.arange(6).reshape(2, 3)))
    _try(tq.kv_batch_put, ["c", "d"], partition, fields=_batch(2, x=torch.arange(8).reshape(2, 4)))
    _try(tq.kv_batch_get, ["a", "b"], partition)
    _try(tq.kv_batch_get, ["a", "c"], partition)
    _try(tq.kv_batch_put, ["a"], partition, fields=_batch(1, x=torch.arange(7).reshape(1, 7)))
    _try(tq.kv_batch_get, ["d", "a", "b"], partition)
    _try(tq.kv_clear, ["a", "b", "c", "d"], partition)
    _try(tq.kv_batch_put, ["a"], partition, fields=_batch(1, x=torch.ones(1, 2)))
    _try(tq.kv_batch_get, ["a"], partition)


@_differs("a field has one dtype, to which rows are converted when put; TransferQueue reads all as the first row")
def _a_dtype_that_changes(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(2, x=torch.arange(6).reshape(2, 3)))
    _try(tq.kv_batch_put, ["a"], partition, fields=_batch(1, x=torch.ones(1, 7)))
    _try(tq.kv_batch_get, ["a"], partition)
    _try(tq.kv_batch_get, ["a", "b"], partition)


@_scene
def _a_dtype_that_changes_after_a_clear(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a"], partition, fields=_batch(1, x=torch.zeros(1, 1)))
    _try(tq.kv_clear, ["a"], partition)
    _try(tq.kv_batch_put, ["b"], partition, fields=_batch(1, x=torch.ones(1, 4, dtype=torch.int64)))
    _try(tq.kv_batch_get, ["b"], partition)


@_scene
def _objects(tq: Any, partition: str) -> None:
    keys = ["a", "b", "c"]
    columns: dict[str, Any] = {
        "texts": NonTensorStack("one", "two", ""),
        "dicts": NonTensorStack({"role": "user", "n": 1}, {"content": [1, "x", None]}, {}),
        "mixed": NonTensorStack(1, "two", None),
        "numbers": NonTensorStack(1, 0, 1),
        "floats": NonTensorStack(0.5, 1, 2),
        "nothing": NonTensorStack(None, None, None),
        "lists": NonTensorStack([1, 2], [], [[3]]),
        "flags": NonTensorStack(True, False, True),
        "big": NonTensorStack(2**70, -(2**63), 0),
        "bytes": NonTensorStack(b"\x00\xff", b"", b"x"),
        "with_tensors": NonTensorStack({"pixel_values": torch.arange(4.0)}, {}, {"grid": torch.tensor([[1, 2]])}),
        "with_arrays": NonTensorStack({"a": np.arange(3)}, {"b": np.float32(0.5)}, {"c": np.int64(3)}),
        "numpy_numbers": NonTensorStack(np.int64(1), np.float64(0.25), np.bool_(True)),
        "object_array": np.array(["x", {"y": 1}, None], dtype=object),
        "integer_keys": NonTensorStack({1: "a"}, {2: {"b": 3}}, {}),
        "list": NonTensorData(["x", "y", "z"], batch_size=[3]),
    }
    for name, column in columns.items():
        _try(tq.kv_batch_put, keys, partition, fields=_batch(3, **{name: column}))
        _try(tq.kv_batch_get, keys, partition, select_fields=[name])
        _try(tq.kv_batch_get, ["b"], partition, select_fields=[name])
    _try(tq.kv_batch_get, keys, partition)
    _try(tq.kv_put, "d", partition, fields={"texts": "four", "dicts": {"x": 1}})
    _try(tq.kv_batch_get, ["a", "d"], partition, select_fields=["texts", "dicts"])


@_scene
def _tuples(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(2, x=NonTensorStack((1, 2), {"y": ()})))
    _try(tq.kv_batch_get, ["a", "b"], partition)


@_differs("NonTensorData is one object shared by all rows; TransferQueue refuses it")
def _one_object_for_all(tq: Any, partition: str) -> None:
    one = _batch(2, x=NonTensorData({"same": "for all"}, batch_size=[2]), y=NonTensorData("same", batch_size=[2]))
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=one)
    _try(tq.kv_batch_get, ["a", "b"], partition)


@_scene
def _numbers_then_other_objects(tq: Any, partition: str) -> None:
    for number, column in enumerate([NonTensorStack(1, 0), NonTensorStack(0.5, 1), NonTensorStack(2, None)]):
        keys = [f"a{number}", f"b{number}"]
        _try(tq.kv_batch_put, keys, partition, fields=_batch(2, x=column))
        _try(tq.kv_batch_get, keys, partition)
    _try(tq.kv_batch_get, ["a0", "b1", "b2"], partition)


@_scene
def _images(tq: Any, partition: str) -> None:
    from PIL import Image

    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    prompt = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]}]
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(2, raw_prompt=NonTensorStack(prompt, [{"role": "x"}])))
    _try(tq.kv_batch_get, ["a", "b"], partition)


@_scene
def _tags(tq: Any, partition: str) -> None:
    keys = ["a", "b"]
    _try(tq.kv_batch_put, keys, partition, tags=[{"n": 1, "s": "x"}, {"n": 2, "list": [1, None], "f": 2.5}])
    _try(tq.kv_list, partition)
    _try(tq.kv_batch_put, keys, partition, tags=[{"n": "text now"}, {}])
    _try(tq.kv_batch_put, keys, partition, fields=_batch(2, x=torch.ones(2, 1)))
    _try(tq.kv_batch_put, keys, partition, tags=[{"deep": {"a": {"b": [1, {"c": None}]}}}, {"n": None, "flag": True}])
    _try(tq.kv_batch_put, keys, partition, tags=[{"only": "one"}])
    _try(tq.kv_batch_put, keys, partition)
    _try(tq.kv_list, partition)
    _try(tq.kv_batch_get, keys, partition)


@_differs("the numbers of a tag have one type: integers among floats become floats of the same value")
def _tags_of_whole_numbers_and_fractions(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, tags=[{"n": 1}, {"n": 2.5}])
    _try(tq.kv_put, "a", partition, tag={"n": 3})
    _try(tq.kv_list, partition)


@_differs("tags are JSON with string keys: tuples become lists, numpy numbers become numbers")
def _tags_that_json_has_not(tq: Any, partition: str) -> None:
    keys = ["a", "b"]
    _try(tq.kv_batch_put, keys, partition, tags=[{"t": (1, 2)}, {"i": 2**70}])
    _try(tq.kv_batch_put, keys, partition, tags=[{"np": np.int64(3)}, {"np": np.float32(0.5)}])
    _try(tq.kv_batch_put, keys, partition, tags=[{1: "integer"}, {"": "empty name"}])
    _try(tq.kv_list, partition)


@_scene
def _fields_that_only_some_have(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(2, x=torch.ones(2, 2), y=torch.zeros(2)))
    _try(tq.kv_batch_put, ["b", "c"], partition, fields=_batch(2, z=torch.ones(2, 3)))
    _try(tq.kv_batch_put, ["d"], partition, tags=[{"status": "pending"}])
    for keys in (["a"], ["b"], ["c"], ["a", "b"], ["b", "c"], ["a", "c"], ["a", "d"], ["d"]):
        _try(tq.kv_batch_get, keys, partition)
        _try(tq.kv_batch_get, keys, partition, select_fields=["x", "z"])
        _try(tq.kv_batch_get, keys, partition, select_fields=["nobody's"])
    _try(tq.kv_batch_get, ["a"], partition, select_fields=[])


@_scene
def _what_is_not_there(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_get, ["a"], partition)
    _try(tq.kv_list, partition)
    _try(tq.kv_clear, ["a"], partition)
    _try(tq.kv_batch_put, ["a"], partition, tags=[{"n": 1}])
    _try(tq.kv_batch_get, ["b"], partition)
    _try(tq.kv_batch_get, ["a", "b"], partition)
    _try(tq.kv_batch_put, ["a", "c"], partition, fields=_batch(2, x=torch.ones(2, 1)))
    _try(tq.kv_batch_get, ["a", "b", "c"], partition)
    _try(tq.kv_clear, ["b", "c"], partition)
    _try(tq.kv_list, partition)
    _try(tq.kv_batch_get, ["a", "c"], partition)
    _try(tq.kv_clear, [], partition)
    _try(tq.kv_batch_get, [], partition)
    _try(tq.kv_batch_put, [], partition, tags=[])
    _try(tq.kv_batch_get, [1], partition)
    _try(tq.kv_clear, ["a"], partition)
    _try(tq.kv_list, partition)
    _try(tq.kv_put, "a", partition, tag={})


@_differs("clear_partition removes a partition without samples; TransferQueue leaves it")
def _a_partition_without_samples(tq: Any, partition: str) -> None:
    _try(tq.kv_put, "a", partition, tag={})
    _try(tq.kv_clear, "a", partition)
    _try(tq.get_client().clear_partition, partition)
    _try(tq.kv_list)
    _try(tq.kv_put, "a", partition, tag={})


@_differs(_IN_VAIN)
def _puts_that_do_not_fit(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "b"], partition, fields=_batch(3, x=torch.ones(3, 1)))
    _try(tq.kv_batch_put, ["a", "b"], partition, tags=[{"n": 1}, {"n": 2}, {"n": 3}])
    _try(tq.kv_list, partition)


@_differs("a duplicate key is refused before anything is written; TransferQueue writes first")
def _a_key_that_comes_twice(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, ["a", "a"], partition, fields=_batch(2, x=torch.ones(2, 1)))
    _try(tq.kv_batch_put, ["a", "a"], partition, tags=[{"n": 1}, {"n": 2}])
    _try(tq.kv_list, partition)
    _try(tq.kv_batch_get, "a", partition)


@_differs("a string for keys is one key; TransferQueue's kv_batch_put returns the string, not a list of keys")
def _one_text_for_keys(tq: Any, partition: str) -> None:
    _try(tq.kv_batch_put, "a", partition, tags=[{"n": 1}])
    _try(tq.kv_batch_put, "ab", partition, tags=[{"n": 1}])
    _try(tq.kv_list, partition)


@_scene
def _metadata_of_batches(tq: Any, partition: str) -> None:
    keys = ["a", "b", "c", "d", "e"]
    fields = _batch(5, x=torch.arange(10).reshape(5, 2), y=_rows(1, 2, 3, 4, 5))
    meta = _try(tq.kv_batch_put, keys, partition, fields=fields, tags=[{"n": n} for n in range(5)])
    if meta is None:
        return
    _try(tq.kv_batch_get_by_meta, meta)
    _try(tq.kv_batch_get_by_meta, meta, select_fields="x")
    _try(tq.kv_batch_get_by_meta, meta, select_fields=["nobody's"])
    for part in meta.chunk(2):
        _try(tq.kv_batch_get_by_meta, part)
    meta.extra_info["temperature"] = 0.5
    joined = tq.KVBatchMeta.concat(meta.chunk(3))
    joined.reorder([4, 3, 2, 1, 0])
    _try(tq.kv_batch_get_by_meta, joined)
    _try(tq.kv_batch_get_by_meta, meta.select_keys(["d", "a"]))
    _try(tq.kv_batch_get_by_meta, tq.KVBatchMeta(keys=["a"], tags=[{}], partition_id=partition))


@_scene
def _async_calls(tq: Any, partition: str) -> None:
    async def run() -> None:
        async def attempt(awaitable: Any) -> None:
            try:
                await awaitable
            except Exception:
                return

        await attempt(tq.async_kv_put("a", partition, fields={"x": torch.arange(2)}, tag={"n": 1}))
        await attempt(tq.async_kv_batch_put(["a", "b"], partition, fields=_batch(2, y=torch.ones(2, 2))))
        await attempt(tq.async_kv_batch_get(["a", "b"], partition))
        await attempt(tq.async_kv_batch_get(["a"], partition, select_fields="x"))
        await attempt(tq.async_kv_list(partition))
        await attempt(tq.async_kv_clear(["a"], partition))
        await attempt(tq.async_kv_list(partition))

    asyncio.run(run())
    asyncio.run(run())


@_scene
def _the_client(tq: Any, partition: str) -> None:
    client = tq.get_client()
    keys = ["a", "b", "c", "d"]
    fields = _batch(4, x=torch.arange(8).reshape(4, 2), text=NonTensorStack("p", "q", "r", "s"))
    _try(tq.kv_batch_put, keys, partition, fields=fields, tags=[{"n": n} for n in range(4)])
    meta = _try(client.kv_retrieve_meta, keys=["b", "d"], partition_id=partition, create=False)
    if meta is None:
        return
    _try(client.get_data, meta)
    _try(client.get_data, meta.select_fields(["x"]))
    written = _try(client.put, data=_batch(2, log_probs=_rows(2, 3, dtype=torch.float32)), metadata=meta)
    if written is not None:
        _try(client.kv_retrieve_keys, global_indexes=written.global_indexes, partition_id=partition)
        _try(client.get_data, written)
    _try(client.kv_retrieve_meta, keys=["b", "nobody"], partition_id=partition, create=False)
    _try(client.kv_retrieve_meta, keys=["new"], partition_id=partition, create=True)
    _try(client.kv_retrieve_meta, keys=["a"], partition_id=f"{partition} of nobody", create=False)
    _try(tq.kv_list, partition)
    _try(client.get_data, tq.BatchMeta.empty())
    _try(client.check_production_status, data_fields=["x"], partition_id=partition)
    _try(client.check_consumption_status, task_name="train", partition_id=partition)
    _try(client.clear_samples, meta)
    _try(tq.kv_list, partition)
    _try(client.clear_partition, partition)
    _try(tq.kv_list, partition)


@_scene
def _samples_that_were_cleared(tq: Any, partition: str) -> None:
    client = tq.get_client()
    meta = _try(client.put, data=_batch(3, x=torch.arange(6).reshape(3, 2)), partition_id=partition)
    if meta is None:
        return
    _try(client.clear_samples, meta.select_samples([0]))
    _try(client.get_data, meta)
    _try(client.get_data, meta.select_samples([1]))
    _try(client.clear_samples, meta)
    _try(client.get_data, meta)
    _try(tq.kv_put, "a", partition, tag={})  # otherwise TransferQueue would not clear the partition


@_differs("a BatchMeta without samples names no fields; TransferQueue's names all fields of the partition")
def _metadata_of_unknown_keys(tq: Any, partition: str) -> None:
    _try(tq.kv_put, "a", partition, fields={"x": torch.ones(1)})
    _try(tq.get_client().kv_retrieve_meta, keys=["nobody"], partition_id=partition, create=False)


@_differs("a task gets samples in insertion order; in TransferQueue, in the order of a set, with its own numbering")
def _tasks_of_the_client(tq: Any, partition: str) -> None:
    client = tq.get_client()
    fields = _batch(6, x=torch.arange(12).reshape(6, 2))
    _try(client.put, data=fields, partition_id=partition)
    ask = {"data_fields": ["x"], "partition_id": partition, "mode": "fetch", "task_name": "train"}
    for _ in range(2):
        meta = _try(client.get_meta, batch_size=2, **ask)
        if meta is not None:
            _try(client.get_data, meta)
    _try(client.check_consumption_status, task_name="train", partition_id=partition)
    _try(client.get_consumption_status, task_name="train", partition_id=partition)
    _try(client.get_meta, batch_size=2, **ask)
    _try(client.check_consumption_status, task_name="train", partition_id=partition)
    _try(client.reset_consumption, partition_id=partition, task_name="train")
    _try(client.check_consumption_status, task_name="train", partition_id=partition)
    _try(client.check_production_status, data_fields=["x"], partition_id=partition)
    _try(client.check_production_status, data_fields=["nobody's"], partition_id=partition)
    _try(client.check_production_status, data_fields=["x"], partition_id=f"{partition} of nobody")
    _try(client.clear_partition, partition)
    _try(client.clear_partition, f"{partition} of nobody")


@_scene
def _checkpoints(tq: Any, partition: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fields = _batch(2, x=_rows(2, 3), text=NonTensorStack("p", {"q": [None]}))
        _try(tq.kv_batch_put, ["a", "b"], partition, fields=fields, tags=[{"n": None}, {"m": [1]}])
        _try(tq.save_checkpoint, f"{directory}/one", metadata={"global_steps": 3})
        _try(tq.kv_batch_put, ["c"], partition, fields=_batch(1, x=_rows(4)))
        _try(tq.kv_clear, ["a"], partition)
        _try(tq.load_checkpoint, f"{directory}/one")
        _try(tq.kv_list)
        _try(tq.kv_batch_get, ["a", "b"], partition)
        _try(tq.kv_batch_get, ["c"], partition)
        _try(tq.save_checkpoint, f"{directory}/one", metadata={"global_steps": 4})
        _try(tq.load_checkpoint, f"{directory}/one")
        _try(tq.load_checkpoint, f"{directory}/nobody's")
        _try(tq.kv_list)


def main() -> None:
    """Connect as a driver does, make all calls, and disconnect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="directory for the record")
    parser.add_argument("--scene", help="run only this scene")
    given = parser.parse_args()

    import ray
    import transfer_queue as tq

    from compat.cluster import two_nodes

    with two_nodes() as address:
        ray.init(address=address, log_to_driver=False, logging_level="error")
        tq.init()
        recorder, kv_list, clear = Recorder(given.record, lambda: "driver"), tq.kv_list, tq.get_client().clear_partition
        recorder.install(tq)
        for scene, purpose in _SCENES:
            name = scene.__name__.removeprefix("_")
            if given.scene in (None, name):
                recorder.note(f"{SCENE}{name}", plain({"purpose": purpose}))
                scene(tq, name)
                print(name, flush=True)
                for partition_id in kv_list():
                    clear(partition_id)
        tq.close()


if __name__ == "__main__":
    main()
