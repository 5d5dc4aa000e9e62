"""The entry point `verl.plugins`, which `import verl` loads in each process: registers the service's parts.

verl ignores a plugin that fails; this one logs the reason as a warning.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from .options import NAME, TESTED

try:
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    from . import trainer  # noqa: F401 - it registers itself
except Exception as error:  # of any kind: the import of another version of verl runs its code
    logging.getLogger("prorl.trainer").warning(
        "prorl_zmq's part of verl cannot be used: %s: %s (verl %s is installed; tested with %s)",
        type(error).__name__,
        error,
        version("verl"),
        TESTED,
    )
    raise
# Resolved but never instantiated: the trainer's processes have no engines.
RolloutReplicaRegistry.register(NAME, lambda: RolloutReplica)
