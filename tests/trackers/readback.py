"""What each library has written, read back: TensorBoard's by its own reader, the others' from their files."""

from __future__ import annotations

import json
import sqlite3
import struct
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from needed import lacking

BLOCK_BYTES, HEADER_BYTES, MAGIC_BYTES = 2**15, 7, 7
Points = dict[str, list[tuple[int, float]]]
"""By name: step and value, as they were logged."""


def library(name: str) -> Any:
    if find_spec(name) is None:
        lacking("trackers", f"{name} is not installed: pip install {name}")
    return import_module(name)


def tensorboard(folder: Path, run: str) -> tuple[Points, list[str]]:
    """Values, and the Markdown of each table."""
    library("tensorboard")
    library("tensorboardX")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / run))
    events.Reload()
    points = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    tables = [tag for tag in events.Tags()["tensors"] if tag.startswith("conversations")]
    return points, [each.tensor_proto.string_val[0].decode() for tag in tables for each in events.Tensors(tag)]


def wandb(folder: Path) -> tuple[Points, list[Any]]:
    """Values of all offline runs of a folder, and the tables."""
    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = {}
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for packed in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(packed)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if name != "step" and not name.startswith("_") and isinstance(value, int | float):
                    points.setdefault(name, []).append((items["step"], value))
    tables = sorted((folder / "wandb").glob("offline-run-*/files/media/table/*.json"))
    return points, [json.loads(file.read_bytes()) for file in tables]


def _records(log: bytes) -> list[bytes]:
    """The records of a file in LevelDB's log format, which W&B's begin with a header of their own."""
    records, place, parts = [], MAGIC_BYTES, b""
    while place + HEADER_BYTES <= len(log):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, place)
        parts += log[place + HEADER_BYTES : place + HEADER_BYTES + length]
        place += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def trackio(folder: Path, project: str) -> tuple[Points, list[Any]]:
    points: Points = {}
    tables = []
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    database.close()
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            if name == "conversations":
                tables.append(value["_value"])
            else:
                points.setdefault(name, []).append((step, value))
    return points, tables


def mlflow(project: str, names: tuple[str, ...]) -> tuple[Points, list[Any], Any]:
    """Values and tables of the one run of a project, and the run."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    points = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)] for name in names
    }
    artifacts = client.list_artifacts(run.info.run_id, "conversations")
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    return points, [json.loads((folder / each.path).read_bytes()) for each in artifacts], run
