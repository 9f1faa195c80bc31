"""A storage service that is killed and stays away, with its mirror in each engine that is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from object_engines import ENGINES, Engine, wait_until

import tq_service as tq
from tq_service.testing import ServiceProcess

_ROWS = 4
_PUTS = 24
_TIMEOUT_SECONDS = 60.0


# Not "memory", which one process has for itself. `make test` tries one engine here; each passes tests/objects too.
_NAMES = sorted(name for name, engine in ENGINES.items() if engine.is_shared)


@pytest.fixture(params=[pytest.param(name, marks=() if name == "file" else pytest.mark.nightly) for name in _NAMES])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = ENGINES[request.param](tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def rows_of(number: int) -> dict[str, object]:
    """Return rows, of which every sixth put is too large to be gathered with others."""
    generator = torch.Generator().manual_seed(number)
    width = 200_000 if number % 6 == 5 else 100
    return {
        "x": torch.randint(0, 1 << 40, (_ROWS, width), generator=generator),
        "text": [f"{'t' * row}{number}" for row in range(_ROWS)],
    }


def keys_of(number: int) -> list[str]:
    """Return the names of the rows of a put."""
    return [f"{number}/{row}" for row in range(_ROWS)]


def fullest(client: tq.Client) -> str:
    """Return the storage service with the most puts, once the controller has heard of all."""
    held: dict[str, int] = {}

    def has_all() -> bool:
        held.update({each.storage_id: each.put_count for each in client.status(explain=False).storages})
        return sum(held.values()) >= _PUTS

    wait_until(has_all, "the controller knows of all puts")
    return max(held, key=lambda name: held[name])


def test_what_a_killed_storage_service_held_is_read_from_another_one(engine: Engine, tmp_path: Path) -> None:
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller", "--data-dir", str(tmp_path / "data")))
        storages = {
            name: stack.enter_context(
                ServiceProcess("--role", "storage", "--controller", controller.address, "--storage-id", name,
                               "--mirror", engine.url, "--max-bytes", "256MiB", log=tmp_path / f"{name}.log")
            )
            for name in ("one", "two")
        }  # fmt: skip
        client = stack.enter_context(tq.Client(controller.address, timeout=_TIMEOUT_SECONDS))
        for number in range(_PUTS):
            client.put("train", rows_of(number), keys=keys_of(number))
        storages[fullest(client)].kill()
        for number in range(_PUTS):
            back = client.get_data("train", keys=keys_of(number), data_fields=["x", "text"], layout="dense")
            expected = rows_of(number)
            assert torch.equal(back["x"], expected["x"])
            assert list(back["text"]) == expected["text"]
        client.put("train", rows_of(_PUTS), keys=keys_of(_PUTS))
        client.clear_partition("train")
