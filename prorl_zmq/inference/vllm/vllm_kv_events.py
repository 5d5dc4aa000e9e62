"""Makes vLLM publish the events of its prefix cache, on sockets in a private folder that only its own host reads."""

from __future__ import annotations

import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ...errors import ConfigError
from ...system.held_file import held
from ...system.run_folder import own_run_dir
from ..engine import KvEventSource

LOCK = "engine.lock"
QUEUE_BATCHES = 1_000_000
"""Batches that vLLM queues for its publisher; a full queue would stop its steps."""


class VllmKvEvents:
    """The sockets of one engine; their folder is removed with the object.

    It is a run folder, locked by this process, so that `prorl clean` removes it if the process was killed.

    Raises:
        ConfigError: the folder for temporary files is not safe, or has no locks.
    """

    def __init__(self) -> None:
        with ExitStack() as stack:
            self._folder = own_run_dir(Path(mkdtemp(prefix="prorl-kv-")))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.enter_context(held(self._folder / LOCK))
            weakref.finalize(self, stack.pop_all().close)

    def ask_for(self, arguments: Any) -> None:
        """Set the events' configuration in vLLM's `AsyncEngineArgs`.

        Raises:
            ConfigError: the flags have their own, or make several caches or none.
        """
        from vllm.config import KVEventsConfig

        if arguments.kv_events_config is not None:
            raise ConfigError("kv_events and vLLM's --kv-events-config exclude each other", key="kv_events")
        if arguments.data_parallel_size > 1:
            raise ConfigError("kv_events needs one cache: it excludes --data-parallel-size", key="kv_events")
        if not arguments.enable_prefix_caching:
            raise ConfigError("kv_events needs vLLM's prefix cache, which a flag turns off", key="kv_events")
        arguments.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self._endpoint("events"),
            replay_endpoint=self._endpoint("replay"),
            max_queue_size=QUEUE_BATCHES,
        )

    def source(self, config: Any) -> KvEventSource:
        """Return where vLLM with this `VllmConfig` publishes."""
        return KvEventSource(self._endpoint("events"), self._endpoint("replay"), config.cache_config.block_size)

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder / name}"
