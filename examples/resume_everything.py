"""Kill all processes of an asynchronous run, then resume from an older checkpoint with fewer ranks.

`python examples/resume_everything.py 3`, where 3 is a seed, starts a service, rollout workers, a reward worker and two
trainer ranks. It kills them all with `kill -9`, deletes the newest checkpoint, and resumes with one rank. At the end,
the weights have been trained on each prompt exactly once. See docs/resuming.md.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tq_service as tq
from tq_service.testing import ServiceProcess

PROMPTS, TRAIN = "prompts", "train"
PROMPT_COUNT, GROUP_SIZE, GLOBAL_BATCH, SAVE_EVERY, LEASE = 48, 2, 4, 2, 2.0


def roll_out(address: str) -> None:
    """Generate responses in steps, until all prompts are answered."""
    with tq.Client(address) as client:
        while True:
            prompt = client.claim(
                partition_id=PROMPTS, task_name="rollout", data_fields=["prompt"], batch_size=1, lease=LEASE,
                admit=tq.Admit(TRAIN, group_size=GROUP_SIZE), max_wait=1.0,
            )  # fmt: skip
            if prompt.status == "end":
                return
            if (slots := prompt.admitted) is None:
                continue
            with suppress(
                tq.errors.LeaseExpiredError, tq.errors.SampleNotFoundError
            ):  # too slow: the prompt was redelivered
                for length in range(0, 12, 4):
                    time.sleep(random.uniform(0.01, 0.05))
                    tokens = [[7, 8, 9, 10]] * GROUP_SIZE
                    slots = client.append(slots, {"tokens": tokens}, at=[length] * GROUP_SIZE)
                client.put(slots, {"finished": [1] * GROUP_SIZE}, ack=True)


def score(address: str) -> None:
    """Add a reward to each sample, until the partition is sealed and all have one."""
    with tq.Client(address) as client:
        while True:
            jobs = client.claim(
                partition_id=TRAIN, task_name="reward", data_fields=["tokens", "finished"], batch_size=8,
                min_batch_size=1, lease=LEASE, max_wait=1.0,
            )  # fmt: skip
            if jobs.status == "end":
                return
            if jobs.status == "batch":
                rewards = [float(sum(tokens)) for tokens in client.get_data(jobs)["tokens"]]
                with suppress(tq.errors.LeaseExpiredError):  # as above
                    client.put(jobs, {"reward": rewards}, ack=True)


def train(address: str, place: str, rank: str, dp_size: str) -> None:
    """Run a trainer rank, whose "weights" are a version and the prompts trained on so far."""
    from tq_service.data import StreamingDataLoader, StreamingDataset  # imports torch, unlike the other processes

    directory, ranks = Path(place), range(int(dp_size))
    dataset = StreamingDataset(
        address, batch_size=GLOBAL_BATCH // len(ranks), batch_unit="group", data_fields=["tokens", "reward"],
        partition_id=TRAIN, task_name="actor", dp_rank=int(rank), dp_size=len(ranks),
    )  # fmt: skip
    weights: dict[str, Any] = {"version": 0, "prompts": []}
    with tq.Client(address) as client, StreamingDataLoader(dataset) as loader:
        if found := checkpoints(directory):
            weights = found[-1]
            loader.load_state_dict(weights["loader"])  # batches not in these weights are planned again
            client.publish_version(weights["version"], rewind=True)
        for _data, meta in loader:
            batch = weights["version"]  # each batch makes one version
            parts = [directory / f"part-{meta.epoch}-{batch}-{each}.json" for each in ranks]
            write(parts[int(rank)], meta.groups)  # in place of an all-reduce of gradients
            while not all(part.exists() for part in parts):
                time.sleep(0.005)
            weights["prompts"] += [prompt for part in parts for prompt in json.loads(part.read_text())]
            weights["version"] += 1
            if rank != "0":
                continue
            client.publish_version(weights["version"], trained={(TRAIN, "actor"): batch})
            if weights["version"] % SAVE_EVERY == 0:
                write(directory / f"checkpoint-{batch:04}.json", weights | {"loader": loader.state_dict()})
                older = checkpoints(directory)[:-1]  # the newest may be lost: keep the samples of the previous one
                if older:
                    client.advance(TRAIN, "actor", saved=older[-1]["version"] - 1)


def checkpoints(directory: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of the trainer, the newest one last."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("checkpoint-*.json"))]


def write(path: Path, content: object) -> None:
    """Write a file atomically."""
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


def start(address: str, directory: Path, dp_size: int) -> list[subprocess.Popen[bytes]]:
    """Start all processes except the service."""
    ranks = [("train", address, str(directory), str(rank), str(dp_size)) for rank in range(dp_size)]
    roles = [("roll_out", address), ("roll_out", address), ("score", address), *ranks]
    return [subprocess.Popen([sys.executable, __file__, *role]) for role in roles]


def run(directory: Path, rng: random.Random) -> None:
    """Run, kill everything, resume, and check the prompts in the weights."""
    names = [f"prompt{number}" for number in range(PROMPT_COUNT)]
    admission = tq.Admission("actor", max_staleness=1, global_batch=GLOBAL_BATCH, unit="group")
    with ServiceProcess(data_dir=directory / "service") as service, tq.Client(service.address) as client:
        client.publish_version(0)
        client.create_partition(PROMPTS, release=tq.Release("trained", ["rollout"]))
        client.create_partition(TRAIN, admissions=[admission], release=tq.Release("saved", ["actor", "reward"]))
        client.put(PROMPTS, {"prompt": names}, keys=names)
        client.seal_partition(PROMPTS)
        processes, kill_at = start(service.address, directory, dp_size=2), rng.randint(5, 8)
        while client.describe_partition(TRAIN).tasks[0].trained_batch_count < kill_at:
            time.sleep(rng.uniform(0.0, 0.1))
        for process in processes:
            process.kill()
        service.kill()
        service.start()
        max(directory.glob("checkpoint-*.json")).unlink()
        version, task = checkpoints(directory)[-1]["version"], client.describe_partition(TRAIN).tasks[0]
        print(f"killed; batches {version} to {task.trained_batch_count - 1} are trained again, by 1 rank", flush=True)
        processes = start(service.address, directory, dp_size=1)
        while not client.check_consumption(PROMPTS, "rollout").complete:
            time.sleep(0.1)
        client.seal_partition(TRAIN)
        codes = [process.wait() for process in processes]
        trained, found = sorted(checkpoints(directory)[-1]["prompts"]), client.describe_partition(TRAIN)
        if any(codes) or trained != sorted(names * GROUP_SIZE):
            sys.exit(f"processes ended with {codes}; the weights were trained on {trained}")
        print(f"{found.released_count} samples were released, {found.summary.present_count} are kept for a resume")
        print(f"each of {PROMPT_COUNT} prompts was trained exactly once")


if __name__ == "__main__":
    if sys.argv[2:]:
        {"roll_out": roll_out, "score": score, "train": train}[sys.argv[1]](*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as path:
            run(Path(path), random.Random("".join(sys.argv[1:])))
