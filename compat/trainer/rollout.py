"""The inference engine: servers whose answers depend on the prompt, the session and the model's weights only."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from compat.trainer.model_files import FIRST_WORD_ID, WORD_COUNT
from compat.trainer.rounds import ABORT, rounds

_MOST_TOKENS = 12
_EXPERT_LAYERS, _EXPERT_CHOICES = 2, 3
_SESSIONS_APART = 8


def _server_name(replica: int) -> str:
    return f"compat_server_{replica}"


class Server:
    """Answers requests, as a Ray actor. Requests wait between an abort and the next resumption."""

    def __init__(self, name: str, with_experts: bool) -> None:
        self._name = name
        self._with_experts = with_experts
        self._version = 0
        self._weights = b""
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any = None, **_: Any
    ) -> TokenOutput:
        """Return the answer to a request or, if it was aborted, one token of it."""
        await self._resumed.wait()
        answer = await rounds().may_generate.remote(self._name, request_id)
        seed = hashlib.sha256(repr((request_id.split(":")[1:], list(prompt_ids))).encode() + self._weights).digest()
        rng = np.random.default_rng(list(seed))
        count = 1 if answer == ABORT else int(rng.integers(1, _MOST_TOKENS + 1))
        tokens = FIRST_WORD_ID + rng.integers(WORD_COUNT, size=count)
        if answer != ABORT:  # the reward depends on the first word, which makes the sessions of a group differ
            tokens[0] = FIRST_WORD_ID + int(request_id.split(":")[1]) % _SESSIONS_APART
        experts = rng.integers(64, size=(len(prompt_ids) + count - 1, _EXPERT_LAYERS, _EXPERT_CHOICES))
        return TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=np.log(rng.random(count)).tolist(),
            routed_experts=experts.astype(np.int32) if self._with_experts else None,
            stop_reason="aborted" if answer == ABORT else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self._version},
        )

    async def use_weights(self, digest: bytes, version: int) -> None:
        """Answer with these weights from now on."""
        self._weights, self._version = digest, version

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Interrupt waiting requests, and let none in before the next resumption."""
        self._resumed.clear()
        await rounds().abort.remote(self._name)

    async def resume_generation(self) -> None:
        """Let requests in again."""
        self._resumed.set()

    async def wake_up(self) -> None:
        """Do nothing, as no memory was released."""

    async def sleep(self) -> None:
        """Do nothing, as no memory is held."""


class Replica(RolloutReplica):
    """One server, next to the worker that provides its weights."""

    async def launch_servers(self) -> None:
        """Start the server."""
        name = _server_name(self.replica_rank)
        actor = ray.remote(Server).options(name=name, max_concurrency=1000)
        handle = actor.remote(name, bool(self.config.enable_rollout_routing_replay))
        self.servers = [handle]
        self._server_handle, self._server_address = handle, name


class Adapter(BaseRollout):
    """Runs in each training worker and passes on the weights."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing, as no memory was released."""

    async def release(self) -> None:
        """Do nothing, as no memory is held."""

    async def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: Any
    ) -> None:
        """Send a digest of the weights to the server of this rank."""
        digest = hashlib.sha256()
        for name, weight in weights:
            digest.update(name.encode() + weight.numpy().tobytes())
        rank = self.device_mesh.get_rank()
        await ray.get_actor(_server_name(rank)).use_weights.remote(digest.digest(), global_steps or 0)
