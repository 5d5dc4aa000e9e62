"""verl 0.9 on a CPU, which it has no platform for: loaded by `VERL_USE_EXTERNAL_MODULES` in each of its processes."""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from prorl_zmq.integrations.dataset_rows import job_maker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Job


ANSWERS = {"mem_get_info": (0, 0), "get_device_name": "CPU"}


class CpuModule(ModuleType):
    """`torch.cpu`, with memory that nobody counts."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("memory_", "max_memory_", "reset_", "empty_cache")):
            return lambda *_: 0
        if name in ANSWERS:
            return lambda *_: ANSWERS[name]
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return SimpleNamespace()


def long_job(row: dict[str, Any]) -> Job:
    """Make jobs whose rollouts are longer than `TOO_LONG` allows, for the most part."""
    return job_maker(max_tokens=32)(row)


def one_backend() -> None:
    """verl asks for a backend per device, which are the same one here."""
    from verl.utils import distributed

    started = distributed.initialize_global_process_group_ray

    def start(timeout_second: Any = None, backend: str | None = None) -> None:
        started(timeout_second, backend or "gloo")

    distributed.initialize_global_process_group_ray = start


one_backend()
