"""Runs in the peer's environment: balances lengths with TransferQueue's Karmarkar-Karp, one request a line of stdin.

A request is a JSON object with `lengths`, `k_partitions` and `equal_size`; the answer one with `seconds` and
`partitions`.
"""

import importlib.util
import json
import sys
import time
import types


def _load_balancing():  # type: ignore[no-untyped-def]  # runs where our code and tools are not
    """Import the module with the balancing without the package's `__init__`, which needs ray and torch."""
    spec = importlib.util.find_spec("transfer_queue")
    if spec is None:
        sys.exit("transfer_queue is not installed")
    package = types.ModuleType("transfer_queue")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["transfer_queue"] = package
    return importlib.import_module("transfer_queue.sampler.seqlen_balanced_sampler")


def main() -> None:
    """Answer requests until stdin ends."""
    balancing = _load_balancing()
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        partitions = balancing.get_seqlen_balanced_partitions(
            request["lengths"], request["k_partitions"], request["equal_size"]
        )
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "partitions": partitions}), flush=True)


if __name__ == "__main__":
    main()
