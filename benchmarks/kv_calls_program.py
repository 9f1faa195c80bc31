"""Runs in TransferQueue's environment, over the `transfer_queue` that it imports: Ray actors that make calls by key.

For the settings of the peer see `transfer_queue_peer.py`. Its two storage units do not exist in the service's
package,
whose address is in `TQ_ADDRESS`.

Samples are like those of verl's trainers: 15 fields with a value per token, 7 with a number per sample and 5 with an
object per sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from benchmarks.peer_program import Commands, serve
from benchmarks.ray_cluster import ray_cluster

_UNIT_COUNT = 2
# Its data bypasses Ray's object store.
_OBJECT_STORE_BYTES = 80 << 20
_CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"num_data_storage_units": _UNIT_COUNT, "total_storage_size": None},
    },
}
_PARTITION, _LISTED = "train", "listed"
_TOKENS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "loss_mask")
_PROBABILITIES = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropys",
    "token_level_scores",
    "token_level_rewards",
    "values",
    "advantages",
    "returns",
)
_INTEGERS, _FLOATS = ("seq_len", "prompt_len", "response_len", "global_steps"), ("rm_scores", "acc", "temperature")
_MEAN_LENGTH, _SPREAD, _LONGEST = 1_000, 0.6, 8_192
_KEYS_A_PUT = 4_096


def _columns(sample_count: int, seed: int) -> tuple[TensorDict, int]:
    """Return 27 fields of samples, for texts of about 1,000 tokens, and the bytes of the tensors."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(_MEAN_LENGTH) - _SPREAD**2 / 2, _SPREAD, sample_count)
    lengths = np.clip(drawn, 1, _LONGEST).astype(np.int64)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    count = int(offsets[-1])
    tokens = torch.from_numpy(rng.integers(0, 150_000, count))
    values = torch.from_numpy(rng.random(count, np.float32))
    fields: dict[str, Any] = {}
    for names, column in ((_TOKENS, tokens), (_PROBABILITIES, values)):
        fields |= {name: torch.nested.nested_tensor_from_jagged(column.clone(), offsets) for name in names}
    fields |= {name: torch.from_numpy(lengths.copy()) for name in _INTEGERS}
    fields |= {name: torch.from_numpy(rng.random(sample_count, np.float32)) for name in _FLOATS}
    fields |= {
        "raw_prompt": NonTensorStack(*[[{"role": "user", "content": f"question {n}"}] for n in range(sample_count)]),
        "reward_model": NonTensorStack(*[{"style": "rule", "ground_truth": str(n)} for n in range(sample_count)]),
        "extra_info": NonTensorStack(*[{"index": n, "split": "train"} for n in range(sample_count)]),
        "data_source": NonTensorStack(*["gsm8k"] * sample_count),
        "uid": NonTensorStack(*[f"uid-{n // 8}" for n in range(sample_count)]),
    }
    size_bytes = count * (8 * len(_TOKENS) + 4 * len(_PROBABILITIES))
    return TensorDict(fields, batch_size=[sample_count]), size_bytes


def _tag(number: int) -> dict[str, Any]:
    return {"status": "finished", "global_steps": number // 512, "seq_len": number % 4_096}


@ray.remote(num_cpus=0)
class _Caller:
    """One of the actors, with its own data."""

    def __init__(self, number: int, sample_count: int) -> None:
        transfer_queue.init()
        self._keys = [f"{number}_{sample}_0" for sample in range(sample_count)]
        self._tags = [_tag(sample) for sample in range(sample_count)]
        self._fields, self._size_bytes = _columns(sample_count, seed=number)

    def megabytes(self) -> float:
        """Return the size of the tensors that it puts, in MB."""
        return self._size_bytes / 1e6

    def put(self) -> tuple[float, float]:
        """Put the samples; return when the call began and ended, by a clock shared by all processes."""
        started = time.perf_counter()
        transfer_queue.kv_batch_put(self._keys, _PARTITION, fields=self._fields, tags=self._tags)
        return started, time.perf_counter()

    def get(self) -> tuple[float, float]:
        """Get the samples; return when the call began and ended."""
        started = time.perf_counter()
        got = transfer_queue.kv_batch_get(self._keys, _PARTITION)
        ended = time.perf_counter()
        if set(got.keys()) != set(self._fields.keys()) or got["uid"][-1] != self._fields["uid"][-1]:
            raise RuntimeError("the get returned other values than the put sent")
        for name in _TOKENS + _PROBABILITIES:
            if not torch.equal(got[name].values(), self._fields[name].values()):
                raise RuntimeError(f"the get of {name} returned other values than the put sent")
        return started, ended

    def clear(self) -> None:
        """Clear them."""
        transfer_queue.kv_clear(self._keys, _PARTITION)


class _Load:
    """The commands; each returns its measurements, in seconds."""

    def __init__(self) -> None:
        self._callers: list[Any] = []

    def commands(self) -> Commands:
        return {
            "versions": _versions,
            "prepare": self.prepare,
            "round_trip": self.round_trip,
            "fill": self.fill,
            "list": self.list,
        }

    def prepare(self, actor_count: int, sample_count: int) -> list[float]:
        """Start the actors; return the MB that the first one puts."""
        self._callers = [_Caller.remote(number, sample_count) for number in range(actor_count)]
        return [ray.get([caller.megabytes.remote() for caller in self._callers])[0]]

    def round_trip(self, actor_count: int) -> list[float]:
        """Let actors put concurrently, then get; return the seconds of all puts and of all gets."""
        callers = self._callers[:actor_count]
        seconds = []
        for name in ("put", "get"):
            times = ray.get([getattr(caller, name).remote() for caller in callers])
            seconds.append(max(ended for _, ended in times) - min(started for started, _ in times))
        ray.get([caller.clear.remote() for caller in callers])
        return seconds

    def fill(self, key_count: int) -> None:
        """Put keys with tags, without data; they stay."""
        for start in range(0, key_count, _KEYS_A_PUT):
            numbers = range(start, min(start + _KEYS_A_PUT, key_count))
            keys = [f"{number}_0" for number in numbers]
            transfer_queue.kv_batch_put(keys, _LISTED, tags=[_tag(number) for number in numbers])

    def list(self, key_count: int) -> list[float]:
        """Return the seconds of a list of these keys."""
        started = time.perf_counter()
        listed = transfer_queue.kv_list(_LISTED)[_LISTED]
        seconds = time.perf_counter() - started
        if len(listed) != key_count or listed["9_0"] != _tag(9):
            raise RuntimeError(f"{len(listed)} keys were listed, expected {key_count} with their tags")
        return [seconds]


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("TransferQueue", "ray", "torch", "tensordict")}


@contextmanager
def _started() -> Iterator[Commands]:
    with ray_cluster(cpu_count=_UNIT_COUNT + 1, object_store_bytes=_OBJECT_STORE_BYTES):
        transfer_queue.init(OmegaConf.create(_CONFIG))
        yield _Load().commands()
        transfer_queue.close()


if __name__ == "__main__":
    serve(_started())
