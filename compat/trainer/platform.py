"""A verl platform whose device is the CPU."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_args: Any, **_kwargs: Any) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU, which Ray counts as a GPU: verl requests one for each training worker."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        **dict.fromkeys(
            (
                "current_device",
                "device_count",
                "empty_cache",
                "max_memory_allocated",
                "max_memory_reserved",
                "memory_allocated",
                "memory_reserved",
                "reset_peak_memory_stats",
                "set_device",
                "synchronize",
                "ipc_collect",
            ),
            _nothing,
        ),
        get_device_name=lambda: "cpu",
        is_available=lambda: False,
        mem_get_info=lambda: (0, 0),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
