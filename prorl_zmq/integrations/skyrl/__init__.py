r"""SkyRL (0.3): rollouts and weights for its trainers.

`ProrlExp` in `experiment` is SkyRL's experiment with this service as its engines; only that module needs SkyRL:

    python -m skyrl.train.entrypoints.main_base \
        trainer.override_entrypoint=prorl_zmq.integrations.skyrl.experiment prorl.served_model=model …

`Generator` is the generator alone, and `generator_output` converts groups collected in another way. The service has
the chat templates, tools and rewards; SkyRL's loop, loss and workers are unchanged.
"""

from ..dataset_rows import dataset_rows, job_maker
from .generator import Generator, TrajectoryID, generator_output

__all__ = ["Generator", "TrajectoryID", "dataset_rows", "generator_output", "job_maker"]
