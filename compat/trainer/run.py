"""Run verl's `TaskRunnerV1` on a cluster of two nodes for some steps, then once more from its checkpoint.

Runs in an environment where `transfer_queue` is one of the two systems.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from compat.cluster import two_nodes
from compat.trainer import model_files
from compat.trainer.recording import DIRECTORY_VARIABLE, RUN_VARIABLE
from compat.trainer.rounds import EVICTED_VARIABLE

_PLUGIN = "compat.trainer.plugin"
_BATCH_SIZE, _SESSION_COUNT = 4, 3
_STOPS = (3, 5)
_FATES = {
    "text": ["good", "good", "fails", "good", "late", "good", "alike", "good", "good"],
    "multimodal": ["good", "good", "good", "fails", "good", "good", "late"],
}
_EVICTED_FATES = {"text": ["fails", "late", "alike"], "multimodal": ["fails", "late"]}


def _common(directory: Path) -> dict[str, Any]:
    """Return the part of verl's configuration that both runs share."""
    return {
        "data.train_files": "train",
        "data.val_files": "validation",
        "data.custom_cls.path": "pkg://compat.trainer.prompts",
        "data.custom_cls.name": "Prompts",
        "data.train_batch_size": _BATCH_SIZE,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "reward.custom_reward_function.path": "pkg://compat.trainer.prompts",
        "reward.custom_reward_function.name": "reward",
        "reward.num_workers": 1,
        "actor_rollout_ref.model.path": str(directory / "model"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.name": "compat",
        "actor_rollout_ref.rollout.n": _SESSION_COUNT,
        "actor_rollout_ref.rollout.full_determinism": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "compat_agent",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 1,
        "trainer.device": "cpu",
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": str(directory / "checkpoints"),
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "trainer.total_epochs": 100,
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.v1.sampler.max_off_policy_threshold": 2,
        "trainer.v1.sampler.max_off_policy_strategy": "drop",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    }


def _text() -> dict[str, Any]:
    """GRPO with a reference model, groups of the same reward filtered, and experts of each token."""
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "reward",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    }


def _multimodal(directory: Path) -> dict[str, Any]:
    """GAE with a critic, a reference model for the reward, and micro-batches by tokens."""
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "critic.model.path": str(directory / "model"),
        "critic.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
    }


def _configuration(kind: str, directory: Path, steps: int, address: str, variables: Mapping[str, str]) -> Any:
    import hydra

    settings = {
        **_common(directory),
        **(_text() if kind == "text" else _multimodal(directory)),
        "trainer.total_training_steps": steps,
        "+data.fates": f"[{','.join(_FATES[kind])}]",
        "+data.images": kind == "multimodal",
        "+ray_kwargs.ray_init.address": address,
        "+ray_kwargs.ray_init.log_to_driver": True,
        **{f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}": f"'{value}'" for name, value in variables.items()},
    }
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=[f"{name}={_word(value)}" for name, value in settings.items()])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    """Train, stop, and continue training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="directory for the record")
    parser.add_argument("kind", choices=_FATES)
    parser.add_argument("--stops", nargs="+", type=int, default=_STOPS, help="steps after which each run ends")
    parser.add_argument("--may-fail", action="store_true", help="allow all runs but the last to end with an error")
    given = parser.parse_args()
    # Workers get only the variables that a user of verl passes through Ray's runtime environment.
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "TQ_ADDRESS") if name in os.environ}
    variables |= {"VERL_USE_EXTERNAL_MODULES": _PLUGIN, DIRECTORY_VARIABLE: str(given.record.absolute())}
    variables |= {EVICTED_VARIABLE: ",".join(_EVICTED_FATES[given.kind])}
    with tempfile.TemporaryDirectory(prefix="verl-") as name, two_nodes() as address:
        directory = Path(name)
        model_files.write_model(directory / "model", images=given.kind == "multimodal")
        for number, steps in enumerate(given.stops, start=1):
            run = {**variables, RUN_VARIABLE: f"run{number}"}
            os.environ.update(run)
            from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # with the variables set, as it reads them

            try:
                run_ppo(_configuration(given.kind, directory, steps, address, run), TaskRunnerV1)
            except ray.exceptions.RayError:
                if not given.may_fail or number == len(given.stops):
                    raise
                traceback.print_exc()
            ray.shutdown()


if __name__ == "__main__":
    main()
