"""verl (0.9): its V1 trainer with the service's rollouts and engines. Needs the extra `[verl]`.

`options` lists the configuration's keys. verl finds `trainer`, `rollouts` and `buffers` through the entry point
`verl.plugins`.
"""

from .rows import agent_loop_outputs

__all__ = ["agent_loop_outputs"]
