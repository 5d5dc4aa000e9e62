"""`BrokerThreads`: the rollout broker and the backend broker, each in a thread of this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..brokers.backends.backend_broker import BackendBroker
from ..brokers.journal.journal import Journal
from ..brokers.rollout.rollout_broker import RolloutBroker

if TYPE_CHECKING:
    from ..brokers.backends.backend_journal import BackendJournal
    from ..config import Topology

STOP_LIMIT_S = 10.0


class BrokerThreads:
    """Starts and stops brokers.

    Args:
        topology: where they bind, and their settings; its `run_dir` exists.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.journal = Journal()
        """The rollout broker's, which outlives it."""
        self._running: dict[str, tuple[RolloutBroker | BackendBroker, threading.Thread]] = {}

    def start_rollout_broker(self) -> None:
        """Start the rollout broker over the journal.

        Raises:
            EndpointInUse, InvalidEndpoint: it could not bind.
        """
        self._start("rollout", RolloutBroker(self.topology, self.journal))

    def start_backend_broker(self, journal: BackendJournal | None = None) -> None:
        """Start the backend broker.

        Raises:
            EndpointInUse, InvalidEndpoint: it could not bind.
        """
        self._start("backend", BackendBroker(self.topology, journal))

    def stop(self, name: str) -> None:
        """Stop the broker `rollout` or `backend`.

        Raises:
            TimeoutError: it did not stop within `STOP_LIMIT_S`.
        """
        broker, thread = self._running.pop(name)
        broker.stop()
        thread.join(STOP_LIMIT_S)
        if thread.is_alive():
            raise TimeoutError(f"the {name} broker did not stop within {STOP_LIMIT_S:g} s")

    def close(self) -> None:
        """Stop both; may be called again."""
        for name in tuple(self._running):
            self.stop(name)

    def _start(self, name: str, broker: RolloutBroker | BackendBroker) -> None:
        thread = threading.Thread(target=broker.run, name=f"{name}-broker", daemon=True)
        self._running[name] = (broker, thread)
        thread.start()
