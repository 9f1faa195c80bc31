"""Imported by verl in each of its processes (`VERL_USE_EXTERNAL_MODULES`): stand-ins, and the recorder.

A run depends on four things that differ each time. This module fixes the names of prompts, which are random, and the
times that are put with the samples. `compat.trainer.rounds` decides when each prompt finishes, and `compat.recorder`
sorts the answers of `kv_list`.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import transfer_queue
from verl.plugin.platform import set_platform

from compat.plain_values import plain
from compat.trainer.platform import CpuPlatform

set_platform(CpuPlatform())

import verl.utils.tracking  # noqa: E402  (all of verl asks for the platform when it is imported)
from verl.experimental.agent_loop import agent_loop as agent_loops  # noqa: E402
from verl.trainer.ppo import padding_utils  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync  # noqa: E402
from verl.utils.import_utils import load_class_from_fqn  # noqa: E402
from verl.workers import engine_workers  # noqa: E402
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

from compat.trainer import agent_loop, engine, faults, images  # noqa: E402, F401  (the first two register themselves)
from compat.trainer.recording import RUN_VARIABLE, recorder  # noqa: E402
from compat.trainer.rounds import rounds  # noqa: E402

_ENGINE = "compat"
# Depends on the machine.
_TIMED_METRICS = ("timing", "perf/", "throughput", "memory", "mfu")
_MOST_ANSWER_SECONDS, _PAUSE_SECONDS = 60.0, 0.05

images.register()
# Replaced by name: a server's process imports that module before verl.
RolloutReplicaRegistry.register(_ENGINE, lambda: load_class_from_fqn("compat.trainer.rollout.Replica"))
base._ROLLOUT_REGISTRY[_ENGINE, "async"] = "compat.trainer.rollout.Adapter"
# A single backend: verl names one for the CPU and one for its device, which is the CPU here.
engine_workers.initialize_global_process_group_ray = functools.partial(
    engine_workers.initialize_global_process_group_ray, backend="gloo"
)


class _Names:
    """Replaces the module `uuid`: names that count up, different in each run."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def uuid4(self) -> _Name:
        return _Name(f"{os.environ[RUN_VARIABLE]}p{next(self._numbers):04}")


class _Name(str):
    __slots__ = ()

    @property
    def hex(self) -> str:
        return str(self)


@contextmanager
def _timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Replaces verl's timer for the times that are put with samples."""
    yield
    timing[name] = 0.125


trainer_base.uuid = padding_utils.uuid = _Names()
agent_loops.simple_timer = _timer


def _before(owner: type, name: str, first: Callable[..., None]) -> None:
    """Call a function before a method of verl's; its signature stays."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, both)


def _announce(self: Any, prompts: Any) -> None:
    if "validate" in prompts and prompts["validate"]:  # noqa: RUF019  (`get` gives the value in its wrapping)
        return
    fates = [str(extra["fate"]) for extra in prompts["extra_info"]]
    uids = [str(uid) for uid in prompts["uid"]]
    ray.get(rounds().submitted.remote(uids, fates, int(self.rollout_config.n)))


def _begin(self: Any, global_steps: int, partition_id: str, batch_size: int) -> None:
    if partition_id == "train":
        ray.get(rounds().begin.remote(batch_size))


def _note_metrics(self: Any, data: dict[str, Any], step: int, **_: Any) -> None:
    kept = {name: value for name, value in data.items() if not any(part in name for part in _TIMED_METRICS)}
    recorder().note("metrics", plain({"step": step}), answer=plain(kept))


def _before_a_look(name: str, _given: dict[str, Any]) -> None:
    """Have prompts answered whose turn it is, and wait until all of their data is stored."""
    if name != "kv_list":
        return
    waiting, end = set(ray.get(rounds().admit.remote())), time.monotonic() + _MOST_ANSWER_SECONDS
    while waiting and time.monotonic() < end:  # a killed worker never answers
        time.sleep(_PAUSE_SECONDS)
        known = _kv_list("train").get("train", {})
        waiting = {uid for uid in waiting if known.get(uid, {}).get("status") in ("pending", "running")}


def _about_to_compute(_self: Any, _data: Any, _loss_function: Any, forward_only: bool = False) -> None:
    faults.reached("forward" if forward_only else "train")


def _look_at_the_end(name: str, _given: dict[str, Any]) -> None:
    """Request all remaining data before it is cleared."""
    if name == "close":
        for partition_id, keys in transfer_queue.kv_list().items():
            for key in keys:
                try:
                    transfer_queue.kv_batch_get(keys=[key], partition_id=partition_id)
                except ValueError:  # only tags
                    continue


_before(AgentLoopManagerTQ, "generate_sequences", _announce)
_before(ReplayBufferAsync, "sample", _begin)
_before(verl.utils.tracking.Tracking, "log", _note_metrics)
_before(engine.Engine, "forward_backward_batch", _about_to_compute)
_kv_list = transfer_queue.kv_list  # not recorded
recorder().watch(_before_a_look)
recorder().watch(_look_at_the_end)
recorder().watch(lambda name, _given: faults.reached(name))
recorder().install(transfer_queue)
