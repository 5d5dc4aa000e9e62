"""The gauges of the backend broker, set once a second."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...metrics import catalog
from ...wire.messages.base import POLICY

if TYPE_CHECKING:
    from .request_handler import BackendRequestHandler

STATES = ("ready", "draining", "updating", "behind", "probation", "unwell")


def set_gauges(handler: BackendRequestHandler) -> None:
    backends = handler.heap.status()
    states: Counter[tuple[str, str]] = Counter((one.backend.name, one.state) for one in backends)
    models = {POLICY, *(one.backend.name for one in backends)}
    for model in models:
        for state in STATES:
            catalog.BACKENDS.set(states[model, state], model, state)
    for one in backends:
        catalog.BACKEND_JOBS.set(one.in_flight, one.backend.backend_id)
        if one.room is not None:
            catalog.BACKEND_ROOM.set(one.room, one.backend.backend_id)
        catalog.BACKEND_WEIGHT_VERSION.set(one.backend.weight_version, one.backend.name, one.backend.backend_id)
        for model, versions in one.backend.adapters.items():
            catalog.BACKEND_WEIGHT_VERSION.set(versions[-1], model, one.backend.backend_id)
    waiting = handler.waiting_by_model()
    for model in models | waiting.keys():
        catalog.BACKEND_JOBS_WAITING.set(waiting.get(model, 0), model)
