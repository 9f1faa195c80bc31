"""A model of a few thousand weights as verl's training engine: policy, reference and critic.

All parts of a batch that a trainer's model reads go into its output: tokens, position ids in all dimensions, and pixel
values. So if any bit of them changes, log probabilities, losses and weights change too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from compat.plain_values import plain
from compat.trainer.model_files import VOCABULARY_SIZE
from compat.trainer.recording import recorder

_WIDTH = 8
_LEARNING_RATE = 0.05
_GRADIENT_NORM = 1.0
_FILE_NAME = "weights.pt"


class Engine(BaseEngine):
    """Shared by policy and critic; `output_size` is the size of the model's output per token."""

    output_size = 0

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.engine_config = engine_config
        self.mode: str | None = None

    def initialize(self) -> None:
        torch.manual_seed(1)
        self.tokens = torch.nn.Embedding(VOCABULARY_SIZE, _WIDTH)
        self.output = torch.nn.Linear(_WIDTH, self.output_size)
        self.module = torch.nn.ModuleList([self.tokens, self.output])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=_LEARNING_RATE)

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **kwargs)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _GRADIENT_NORM)
        self.optimizer.step()
        return float(norm)

    def lr_scheduler_step(self) -> float:
        return _LEARNING_RATE

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_per_tensor_param(self, **_kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return iter(self.module.state_dict().items()), None

    def save_checkpoint(self, local_path: str, *_args: Any, **_kwargs: Any) -> None:
        weights = dict(self.module.state_dict())
        recorder().note("weights saved", {}, answer=plain(weights))
        if dist.get_rank() == 0:
            Path(local_path).mkdir(parents=True, exist_ok=True)
            torch.save(weights, Path(local_path) / _FILE_NAME)
        dist.barrier()

    def load_checkpoint(self, local_path: str, *_args: Any, **_kwargs: Any) -> None:
        self.module.load_state_dict(torch.load(Path(local_path) / _FILE_NAME))

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        recorder().note("forward" if forward_only else "train", {}, answer=plain(data))
        token_count = data["loss_mask"].sum()
        dist.all_reduce(token_count)
        sizes = {"sp_size": 1, "batch_num_tokens": token_count.item(), "dp_size": self.get_data_parallel_size()}
        tu.assign_non_tensor(data, **sizes)
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=dist.group.WORLD)
        outputs = []
        for micro_batch in micro_batches:
            with torch.set_grad_enabled(not forward_only):
                loss, output = self._forward(micro_batch, loss_function)
                if not forward_only:
                    loss.backward()
                    del output["model_output"]
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _forward(
        self, batch: TensorDict, loss_function: Callable[..., Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        output = self._model_output(self.output(self._hidden(batch)), batch["input_ids"])
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=batch, dp_group=dist.group.WORLD)
        return loss, {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}

    def _hidden(self, batch: TensorDict) -> torch.Tensor:
        """Return the model's features of each token of a batch, (tokens, width)."""
        ids, positions = batch["input_ids"], batch["position_ids"].values().float()
        if positions.dim() > 1:  # (4, tokens): of text and of the three axes of an image
            positions = (positions * torch.tensor([[1.0], [0.5], [0.25], [0.125]])).sum(0)
        hidden = self.tokens(ids.values()) + 0.01 * torch.sin(positions).unsqueeze(-1)
        if "multi_modal_inputs" in batch:
            pictures = torch.tensor([_brightness(inputs) for inputs in batch["multi_modal_inputs"]])
            hidden = hidden + pictures.repeat_interleave(ids.offsets().diff()).unsqueeze(-1)
        return torch.tanh(hidden)

    def _model_output(self, output: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


def _brightness(inputs: Any) -> float:
    pixels = dict(inputs).get("pixel_values")
    return 0.0 if pixels is None else float(pixels.double().mean())


@EngineRegistry.register(model_type="language_model", backend="fsdp", device="cpu")
class PolicyEngine(Engine):
    """Returns log probabilities and entropies of the next tokens."""

    output_size = VOCABULARY_SIZE

    def _model_output(self, output: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        log_probs = torch.log_softmax(output, dim=-1)
        following = torch.roll(ids.values(), shifts=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        values = {"log_probs": log_probs.gather(-1, following.unsqueeze(-1)).squeeze(-1), "entropy": entropy}
        return {name: torch.nested.nested_tensor_from_jagged(value, ids.offsets()) for name, value in values.items()}


@EngineRegistry.register(model_type="value_model", backend="fsdp", device="cpu")
class ValueEngine(Engine):
    """Returns values of tokens."""

    output_size = 1

    def _model_output(self, output: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"values": torch.nested.nested_tensor_from_jagged(output.squeeze(-1), ids.offsets())}
