"""What `import verl` loads by the entry point `verl.plugins`, in each of its processes: it registers our parts.

verl says nothing of a plugin that fails, so this one says it itself.
"""

from __future__ import annotations

import logging

from .options import NAME, TESTED

try:
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    from . import trainer, weights  # noqa: F401 - they register themselves
except Exception as error:
    from importlib.metadata import version

    logging.getLogger("prorl.trainer").warning(
        "prorl_zmq's part of verl cannot be used: %s: %s (verl %s is installed; tested with %s)",
        type(error).__name__,
        error,
        version("verl"),
        TESTED,
    )
    raise
else:
    # Resolved, and never made: the trainer's processes have no engines.
    RolloutReplicaRegistry.register(NAME, lambda: RolloutReplica)
