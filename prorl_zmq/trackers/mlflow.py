"""MLflow, on the server or in the store that `MLFLOW_TRACKING_URI` names; `mlflow-skinny` is enough for a server.

MLflow chooses the ids of runs, so an existing run is found by a tag. Each table is a JSON file among the run's
artifacts, in the columns of a pandas table, which MLflow's page shows as text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from .adapter import TABLE, Adapter
from .conversation import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .adapter import RunSettings
    from .conversation import Conversation

TAG = "prorl.run"


class Mlflow(Adapter):
    library = package = "mlflow"

    def __init__(self, settings: RunSettings) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(settings.project)
        ours = experiment.experiment_id if experiment else self._client.create_experiment(settings.project)
        found = self._client.search_runs([ours], f"tags.`{TAG}` = '{settings.run}'", max_results=1)
        run = found[0] if found else self._client.create_run(ours, run_name=settings.run, tags={TAG: settings.run})
        self._run_id = run.info.run_id
        if found:
            self._client.update_run(self._run_id, status="RUNNING")
        else:  # a parameter is written once
            params = [Param(name, str(value)) for name, value in settings.config.items()]
            self._client.log_batch(self._run_id, params=params)
        self.where = f"{self._client.tracking_uri}, run {self._run_id}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = round(1000 * time.time())
        self._client.log_batch(self._run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        table = {"columns": COLUMNS, "data": [msgspec.structs.astuple(row) for row in rows]}
        self._client.log_dict(self._run_id, table, f"{TABLE}/step-{step:08d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
