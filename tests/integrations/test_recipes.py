"""The recipes of docs/other-trainers.md, with finished rollouts."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from documents import PAGES, ROOT
from finished_groups import chat, group, rewritten, with_tool

from prorl_zmq import Job
from prorl_zmq.errors import InvalidJob, NotTrainable
from prorl_zmq.integrations.dataset_rows import dataset_rows

if TYPE_CHECKING:
    from prorl_zmq.data.trajectory import Trajectory

BASES = {
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": dict},
    "openrlhf.utils.agent": {"AgentExecutorBase": type("AgentExecutorBase", (), {})},
    "areal.api.workflow_api": {"RolloutWorkflow": type("RolloutWorkflow", (), {})},
}
"""What the recipes import from packages that need GPUs: a dict, and base classes with nothing in them."""
JOB = Job(task="math", instance={"problem": "1 + 1", "ground_truth": "2"})
LABEL = json.dumps(dataset_rows([JOB])[0])
PARAMETERS = SimpleNamespace(temperature=0.5, top_p=1.0, top_k=-1, min_p=0.0)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the recipe of a framework and return the names that it defines."""
    for module, names in BASES.items():
        made = ModuleType(module)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, module, made)
    (text,) = re.findall(
        rf"^## {request.param}$.*?^```python\n(.*?)^```",
        PAGES[ROOT / "docs/other-trainers.md"],
        re.DOTALL | re.MULTILINE,
    )
    if "import torch" in text:
        pytest.importorskip("torch", reason="it is of the extra [train]")
    if "from tinker" in text:
        pytest.importorskip("tinker", reason="`make trainers` installs tinker")
    defined: dict[str, Any] = {}
    exec(compile(text, "other-trainers.md", "exec"), defined)
    return defined


class Jobs:
    """Ends jobs with the given trajectories, one after the other."""

    def __init__(self, *ends: Trajectory) -> None:
        self.asked: list[Job] = []
        self._ends = iter(ends)

    async def run(self, job: Job) -> Trajectory:
        self.asked.append(job)
        return next(self._ends)


@pytest.mark.parametrize("recipe", ["NeMo RL"], indirect=True)
def test_nemo_rls_arrays(recipe: dict[str, Any]) -> None:
    batch = [group("a", chat([1], [2], 0.0), chat([1], [2, 3], 1.0)), group("b", chat([4, 5, 6], [7], 0.5))]
    arrays = recipe["train_data"](batch, pad_id=77, multiple_of=8)
    assert arrays["input_ids"].tolist()[2] == [4, 5, 6, 9, 7, 77, 77, 77]
    assert arrays["input_lengths"].tolist() == [3, 4, 5]
    assert arrays["token_mask"].sum(1).tolist() == [1, 2, 1]
    assert arrays["generation_logprobs"][1].tolist() == [0, 0, -0.5, -1, 0, 0, 0, 0]
    assert arrays["total_reward"].tolist() == [0, 1, 0.5]
    assert arrays["prompt_ids_for_adv"].tolist() == [[0], [0], [1]]
    with pytest.raises(NotTrainable, match=r"job x has several segments.*history = 'append'"):
        recipe["train_data"]([group("a", rewritten(job_id="x"))], 0)


@pytest.mark.parametrize("recipe", ["Tinker"], indirect=True)
def test_tinker_gets_shifted_tokens_with_advantages(recipe: dict[str, Any]) -> None:
    batch = [group("a", rewritten(1.0), chat([1], [2], 0.0)), group("b", with_tool(2.0), chat([1], [2], 1.0))]
    found = recipe["datums"](batch)
    assert [one.model_input.to_ints() for one in found[3:]] == [[1, 2, 3, 9, 10, 11, 8, 20, 21, 9], [1, 9]]
    inputs = {name: value.to_numpy() for name, value in found[3].loss_fn_inputs.items()}
    assert inputs["target_tokens"].tolist() == [2, 3, 9, 10, 11, 8, 20, 21, 9, 12]
    assert inputs["logprobs"].tolist() == [0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1.0]
    assert inputs["advantages"].tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0, 0, 0.5]
    sums = [one.loss_fn_inputs["advantages"].to_numpy().sum() for one in found]
    assert sums == [1.0, 0.5, -0.5, 1.5, -0.5], "each segment has its rollout's advantage, whose mean counts rollouts"


@pytest.mark.parametrize("recipe", ["OpenRLHF"], indirect=True)
def test_openrlhf_gets_whole_sequences_and_no_made_up_reward(recipe: dict[str, Any]) -> None:
    executor = recipe["AgentExecutor"]()
    executor.jobs = jobs = Jobs(chat([1], [2], None), with_tool(1.0), *(chat([1], [2], None) for _ in range(3)))

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = await executor.execute("?", LABEL, PARAMETERS, 8, None, None)
        with pytest.raises(NotTrainable, match="reward None"):
            await executor.execute("?", LABEL, PARAMETERS, 8, None, None)
        return found

    got = asyncio.run(run())
    assert (got["prompt"], got["label"], got["reward"], got["scores"]) == ("?", LABEL, 1.0, 1.0)
    assert got["observation_tokens"] == [1, 2, 3, 9, 10, 11, 8, 20]
    assert got["action_ranges"] == [(4, 6)]
    assert got["rollout_log_probs"] == [0, 0, 0, 0, -0.25, -0.5, 0, 0]
    assert got["truncated"] is True
    assert len({job.job_id for job in jobs.asked}) == 5
    assert (jobs.asked[0].instance, jobs.asked[0].sampling.temperature) == (JOB.instance, 0.5)


@pytest.mark.parametrize("recipe", ["AReaL"], indirect=True)
def test_areal_gets_tensors(recipe: dict[str, Any]) -> None:
    workflow = recipe["ServiceWorkflow"]()
    workflow.jobs = jobs = Jobs(with_tool(1.0))

    async def run() -> dict[str, Any]:
        with pytest.raises(InvalidJob, match="without task and instance"):
            await workflow.arun_episode(None, {"question": "1 + 1"})
        found: dict[str, Any] = await workflow.arun_episode(None, json.loads(LABEL))
        return found

    got = asyncio.run(run())
    assert jobs.asked[0].instance == JOB.instance
    assert got["input_ids"].tolist() == [[1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]]
    assert got["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]]
    assert got["versions"].tolist() == [[-1, -1, -1, -1, 4, 4, -1, -1, -1, -1, 5]]
    assert got["logprobs"].tolist() == [[0, 0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1.0]]
    assert got["attention_mask"].all()
    assert got["rewards"].tolist() == [1.0]
    assert got["input_ids"].shape == (1, 11)
