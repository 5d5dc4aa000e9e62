"""What records of every engine are held to; also imported by scripts in vLLM's Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_zmq.inference.engine import Wanted
from prorl_zmq.inference.records import check_records
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    import numpy as np

    from prorl_zmq.inference.engine import Engine, Generation

EXACT, APART = 1e-4, 1e-2
"""In nats: the largest gap that float32 explains, and the least that a wrong route makes."""
CUTS = [
    Sampling(1.0, 40, top_p=0.9),
    Sampling(0.7, 40, top_p=0.9),
    Sampling(1.0, 40, top_k=20),
    Sampling(1.0, 40, top_k=50, top_p=0.8),
    Sampling(1.0, 40, min_p=0.05),
    Sampling(0.6, 40, top_k=40, top_p=0.95, min_p=0.01),
]


async def turn(
    engine: Engine, prompt: np.ndarray[Any, Any], sampling: Sampling, *record: str, rows_known: int = 0
) -> Generation:
    """Generate a turn whose records have the right shapes."""
    done = await engine.generate(prompt, sampling, (), "job", Wanted(record, rows_known))
    positions = len(prompt) + len(done.token_ids) - 1 - rows_known
    check_records(done.records, record, done.token_ids, positions=positions, vocabulary=1024)
    return done
