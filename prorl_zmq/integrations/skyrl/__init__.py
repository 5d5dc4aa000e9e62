r"""SkyRL (0.3): rollouts and weights for its trainers.

`ProrlExp` in `experiment` is its experiment with this service in place of its engines; only that module needs SkyRL:

    python -m skyrl.train.entrypoints.main_base \
        trainer.override_entrypoint=prorl_zmq.integrations.skyrl.experiment prorl.served_model=model …

`Generator` is its generator alone, and `generator_output` converts groups that were collected otherwise. Chat
templates, tools and rewards are the service's; SkyRL's loop, loss and workers are used as they are.
"""

from ..dataset_rows import dataset_rows, job_maker
from .generator import Generator, TrajectoryID, generator_output

__all__ = ["Generator", "TrajectoryID", "dataset_rows", "generator_output", "job_maker"]
