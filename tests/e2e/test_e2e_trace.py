"""Requests of a trace that arrive in bursts, in one long-lived partition that its ranks clear batch by batch."""

from __future__ import annotations

import csv
import os
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess

DATA = Path(os.environ.get("TQ_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
RECORDED = DATA / "azure_llm_trace_conv.csv"
REQUEST_COUNT = 500
RANKS = 2
Lengths = list[tuple[int, int]]


def recorded_lengths() -> Lengths:
    """Return prompt and response lengths of the first requests of the trace."""
    with RECORDED.open(newline="") as lines:
        rows = zip(range(REQUEST_COUNT), csv.DictReader(lines), strict=False)
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for _, row in rows]


def made_lengths() -> Lengths:
    return [(50 + 37 * i % 400, 1 + 13 * i % 90) for i in range(REQUEST_COUNT)]


def tokens_of(number: int, length: int) -> torch.Tensor:
    return torch.randint(0, 32_000, (length,), generator=torch.Generator().manual_seed(number), dtype=torch.int32)


def checksum_of(*columns: torch.Tensor) -> int:
    return zlib.crc32(torch.cat(columns).numpy().tobytes())


def produce(address: str, lengths: Lengths) -> None:
    """Put the requests in bursts of one to seven."""
    with tq.Client(address) as client:
        start = 0
        while start < len(lengths):
            burst = range(start, min(start + 1 + start % 7, len(lengths)))
            prompts = [tokens_of(2 * number, lengths[number][0]) for number in burst]
            responses = [tokens_of(2 * number + 1, lengths[number][1]) for number in burst]
            pairs = list(zip(prompts, responses, strict=True))
            client.put(
                "trace",
                {
                    "number": torch.tensor(burst),
                    "prompt": prompts,
                    "response": responses,
                    "checksum": torch.tensor([checksum_of(*pair) for pair in pairs]),
                },
                custom_meta=[{"total_lengths": prompt.numel() + response.numel()} for prompt, response in pairs],
            )
            start = burst.stop
        client.seal_partition("trace")


def consume(address: str, rank: int) -> list[int]:
    """Take all batches of a rank, checking and clearing each; return the numbers of the requests."""
    dataset = StreamingDataset(
        address, batch_size=32, micro_batch_size=32, data_fields=["number", "prompt", "response", "checksum"],
        partition_id="trace", task_name="update_actor", dp_rank=rank, dp_size=RANKS, sampler="seqlen_balanced",
    )  # fmt: skip
    seen: list[int] = []
    with tq.Client(address) as client:
        for batch, meta in StreamingDataLoader(dataset, num_workers=0):
            for position in range(meta.size):
                pair = batch["prompt"][position], batch["response"][position]
                assert checksum_of(*pair) == batch["checksum"][position]
                assert meta.custom_meta[position]["total_lengths"] == sum(column.numel() for column in pair)
            seen += batch["number"].tolist()
            if meta.size:
                client.clear_samples(meta)
    return seen


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(
            recorded_lengths,
            id="recorded",
            marks=pytest.mark.skipif(not RECORDED.exists(), reason=f"needs the trace {RECORDED}"),
        ),
        pytest.param(made_lengths, id="made"),
    ],
)
def test_every_request_is_consumed_once_and_leaves_nothing_behind(lengths) -> None:
    with ServiceProcess() as service, ThreadPoolExecutor(RANKS + 1) as pool:
        ranks = [pool.submit(consume, service.address, rank) for rank in range(RANKS)]
        pool.submit(produce, service.address, lengths()).result(100)
        seen = Counter(number for rank in ranks for number in rank.result(100))
        assert seen == dict.fromkeys(range(REQUEST_COUNT), 1)
        with tq.Client(service.address) as client:
            deadline = time.monotonic() + 10.0  # a put that was being compacted as it went is a moment later
            while client.storage_stat().used_bytes and time.monotonic() < deadline:
                time.sleep(0.01)
            assert client.storage_stat().used_bytes == 0
