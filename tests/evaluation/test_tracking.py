"""What `prorl eval --log` logs, by TensorBoard's own reader; a run that continues logs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_zmq.evaluation.run_folder import RunFolder
from prorl_zmq.evaluation.summary import Counting, summarise
from prorl_zmq.evaluation.tracking import EvaluationLog, run_config, summary_values
from prorl_zmq.trackers import open_tracker
from prorl_zmq.wire.messages.jobs import Outcome

from ..trackers import readback
from .conftest import HOSTILE, filled, made_plan, made_sample

if TYPE_CHECKING:
    from pathlib import Path
