"""The examples of docs/adapters.md, run on tiny models; the engines here have no adapters, so the policy is trained."""

from __future__ import annotations

import asyncio
import re
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from documents import PAGES, ROOT
from support.rescoring import teacher_policy

from prorl_zmq import Sampling
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.testing import LocalService, say

from .conftest import gateway_of

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq import Group

TRAIN, LOSSES, ASK = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "docs" / "adapters.md"], re.DOTALL)
SIZES = "target_groups=16, group_size=8"


def defined(code: str, name: str) -> Any:
    names: dict[str, Any] = {"Sampling": Sampling}
    exec(code, names)
    return names[name]


def test_the_loop_trains_with_a_teacher_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SIZES in TRAIN
    assert "client.remove_model(name)" in TRAIN
    small = TRAIN.replace(SIZES, 'target_groups=2, group_size=2, keep="all"').replace("client.remove_model(name)", "")
    small = small.replace("model=name, record=", "model=name, sampling=Sampling(max_tokens=24), record=")
    assert "Sampling" in small
    learned: list[Group] = []

    def folder_of(version: int) -> Path:
        return tmp_path / f"{version}.npz"

    def learn(groups: list[Group], path: Path) -> None:
        learned.extend(groups)
        base_policy().save(path)

    base_policy().save(folder_of(1))
    problems = ({"problem": f"{number} + 1?", "ground_truth": "2"} for number in count())
    models = {"teacher": EmbeddedEngine(teacher_policy())}
    with (
        LocalService(engine=EmbeddedEngine(base_policy()), models=models) as service,
        service.client(session="a", timeout_s=60.0) as client,
    ):
        defined(small, "train")(client, "policy", folder_of, learn, problems, 3)
        assert {one.backend.weight_version for one in client.backends.list()} == {0, 3}
    assert len(learned) == 4
    for trajectory in learned[0].trajectories:
        scores = defined(LOSSES, "losses")(trajectory)
        assert scores.shape == (int(trajectory.loss_mask.sum()),)
        assert bool(np.isfinite(scores).all())
    assert "top_ids int32" in capsys.readouterr().out


def test_an_evaluation_asks_for_a_version(tmp_path: Path) -> None:
    pytest.importorskip("openai")

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url:
            said = await asyncio.to_thread(defined(ASK, "ask"), url, "-", "1 + 1?", "policy@0")
            assert said == ("yes", "policy@0")

    with LocalService(engine=say(lambda _: "yes")) as service:
        asyncio.run(main())
