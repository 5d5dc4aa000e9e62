"""The example's processes: a service of its own, and the engine beside it, registered at the service's backend broker.

The journal and the logs lie in the run's folder. So a run that is resumed starts a service that still has what the
last one had under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ...demo.service import trainer_service
from ...errors import ConfigError
from ...service.child import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

    from ...client.blocking.client import RolloutClient

JOURNAL = "rollout.journal"
NICE = 10
"""The learner is one thread, and rollouts are many processes: it goes first, so that all cores are busy to the end."""


class Processes:
    """Starts the service and the engine, and ends them with the context, the service first."""

    def __init__(
        self, out: Path, weights: Path, weight_version: int, tokenizer: Path, sandbox: str, slots: int, device: str
    ) -> None:
        journal = str(out.absolute() / JOURNAL)
        self._service = trainer_service(out, sandbox, slots=slots, ready_limit=8, journal=journal, nice=NICE)
        self.front_door = self._service.front_door
        self._engine = ChildProcess(
            [
                "prorl_zmq.examples.train_torch.engine",
                *("--weights", str(weights), "--weight-version", str(weight_version)),
                *("--tokenizer", str(tokenizer), "--run-dir", self._service.run_dir, "--device", device),
            ],
            self._service.logs / "engine.log",
            NICE,
        )

    def __enter__(self) -> Self:
        self._engine.__enter__()
        self._service.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._service.__exit__()
        finally:
            self._engine.__exit__()

    def wait_ready(self, client: RolloutClient) -> None:
        self._service.wait_ready(client)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` if one of them has ended."""
        if not self._engine.is_running:
            raise ConfigError(f"the engine has ended; {self._engine.log} says why")
        if not self._service.is_running:
            raise ConfigError(f"the service has ended; see the logs in {self._service.logs}")
