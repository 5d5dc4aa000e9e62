from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import pydantic
import pytest
from documents import blocks
from finished_groups import Turn, chat, group, groups, rewritten, trajectory, with_tool
from framework_python import framework_python
from framework_source import lifted
from hypothesis import given
from vllm_python import environment

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import NotTrainable
from prorl_zmq.integrations.verl import agent_loop_outputs

if TYPE_CHECKING:
    from prorl_zmq import Group

VERSION = "0.9.1"
PAD = 77
BATCH = [group("a", chat([1, 2], [3, 4], 0.25), with_tool(1.0)), group("b", chat([1], [2, 3, 4], version=7))]


def recipe(verl: Any = None) -> Any:
    """Return `data_proto` of docs/other-trainers.md, with verl's class or what the test gives for it."""
    defined: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, attribute in (("verl", "DataProto"), ("tensordict", "TensorDict")):
            module = ModuleType(name)
            setattr(module, attribute, verl if name == "verl" else lambda tensors, _: tensors)
            patch.setitem(sys.modules, name, module)
        exec(RECIPE, defined)
    return defined["data_proto"]


pytestmark = pytest.mark.xdist_group("transformers")
(RECIPE,) = [block for block in blocks("python") if "def data_proto" in block]
LENGTHS = {"prompt_length": 5, "response_length": 8, "pad_token_id": PAD}


def test_the_batch_of_a_rollout() -> None:
    pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")
    proto = recipe(SimpleNamespace)(BATCH, **LENGTHS)
    batch, non_tensor, meta = proto.batch, proto.non_tensor_batch, proto.meta_info
    assert batch["prompts"].tolist() == [[PAD, PAD, 1, 2, 9], [PAD, 1, 2, 3, 9], [PAD, PAD, PAD, 1, 9]]
    assert batch["responses"].tolist() == [
        [3, 4, *[PAD] * 6],
        [10, 11, 8, 20, 21, 9, 12, PAD],
        [2, 3, 4, *[PAD] * 5],
    ]
    assert batch["input_ids"].tolist() == np.hstack([batch["prompts"], batch["responses"]]).tolist()
    assert batch["attention_mask"].tolist() == (batch["input_ids"] != PAD).int().tolist()
    assert batch["response_mask"][1].tolist() == [1, 1, 0, 0, 0, 0, 1, 0]
    assert batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert batch["rollout_log_probs"][1].tolist() == [-0.25, -0.5, 0, 0, 0, 0, -1, 0]
    assert np.argwhere(batch["rm_scores"].numpy()).tolist() == [[0, 1], [1, 6], [2, 2]]
    assert batch["rm_scores"].sum(1).tolist() == [0.25, 1.0, 1.0]
    assert {key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in batch.items()} == {
        "prompts": ("int64", (3, 5)),
        "responses": ("int64", (3, 8)),
        "response_mask": ("int64", (3, 8)),
        "input_ids": ("int64", (3, 13)),
        "attention_mask": ("int64", (3, 13)),
        "position_ids": ("int64", (3, 13)),
        "rollout_log_probs": ("float32", (3, 8)),
        "rm_scores": ("float32", (3, 8)),
    }
    assert non_tensor["uid"].tolist() == ["a", "a", "b"]
    assert non_tensor["uid"].dtype == object
    assert non_tensor["__num_turns__"].tolist() == [2, 5, 2]
    assert (non_tensor["min_global_steps"].tolist(), non_tensor["max_global_steps"].tolist()) == ([0, 4, 7], [0, 5, 7])
    assert {"turn_scores", "tool_rewards", "extras"} <= set(non_tensor)
    assert len(meta["metrics"]) == 3
    assert meta["reward_extra_keys"] == []


def test_nothing_is_cut() -> None:
    pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")
    for lengths in ({"prompt_length": 3}, {"response_length": 6}):
        with pytest.raises(NotTrainable, match="is longer than prompt_length or response_length"):
            recipe()(BATCH, **{**LENGTHS, **lengths})
    with pytest.raises(NotTrainable, match=r"job x has several segments.*V1 trainer"):
        recipe()([group("a", rewritten(job_id="x"))], **LENGTHS)


def test_rewards_of_turns_are_at_their_tokens() -> None:
    pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")
    turns = [Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [], [(2, -0.5, 0), (3, -0.5, 0)], reward=-0.25)]
    turns += [Turn(Role.USER, [4]), Turn(Role.ASSISTANT, [], [(5, -0.5, 0)])]
    proto = recipe(SimpleNamespace)([group("a", trajectory(turns, 1.0))], **LENGTHS)
    assert proto.batch["rm_scores"].tolist() == [[0.0, -0.25, 0.0, 1.25, 0.0, 0.0, 0.0, 0.0]]


def test_several_segments_are_several_outputs() -> None:
    timings = {"engine": 2.0, "tool.bash": 0.5, "tool.ipython": 0.25, "eval": 1.0, "run": 3.0}
    batch = [group("a", chat([1], [2], 0.0), rewritten(1.0, job_id="x", timings=timings))]
    outputs = agent_loop_outputs(batch)
    assert [len(segments) for segments in outputs] == [1, 2]
    assert outputs[1][1] == {
        "prompt_ids": [2, 3, 9, 11, 8, 20, 9],
        "response_ids": [12],
        "response_mask": [1],
        "response_logprobs": [-1.0],
        "reward_score": 1.0,
        "num_turns": 4,
        "metrics": {"generate_sequences": 2.0, "tool_calls": 0.75, "compute_score": 1.0, "num_preempted": -1},
        "extra_fields": {"reward_extra_info": {}, "min_global_steps": 5, "max_global_steps": 5},
    }


@given(groups())
def test_agent_loop_outputs_hold_all_that_was_generated(batch: list[Group]) -> None:
    members = [member for one in batch for member in one.trajectories]
    for member, segments in zip(members, agent_loop_outputs(batch), strict=True):
        masks = [mask for segment in segments for mask in segment["response_mask"]]
        ids = [token for segment in segments for token in segment["response_ids"]]
        generated = [token for token, mask in zip(ids, masks, strict=True) if mask]
        assert generated == member.token_ids[member.loss_mask].tolist()
        assert {segment["reward_score"] for segment in segments} == {member.reward}


@pytest.mark.proof
def test_verl_takes_the_fields_of_an_agent_loop_output() -> None:
    torch = pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")
    known: dict[str, Any] = {
        "BaseModel": pydantic.BaseModel,
        "Optional": Optional,
        "Any": Any,
        "torch": torch,
        "__name__": "agent_loop",
    }
    path = "verl/experimental/agent_loop/agent_loop.py"
    space = lifted("verl", VERSION, path, ("AgentLoopMetrics", "AgentLoopOutput"), known)
    output = space["AgentLoopOutput"]
    output.model_rebuild(_types_namespace=space)
    fields = agent_loop_outputs(BATCH)[1][0]
    assert set(fields) <= set(output.model_fields)
    columns = output(**fields).as_dict()
    assert columns["prompts"].tolist() == [1, 2, 3, 9]
    assert columns["response_mask"].tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert columns["rm_scores"].tolist() == [0, 0, 0, 0, 0, 0, 1]


@pytest.mark.proof
def test_verl_finds_the_groups_by_uid() -> None:
    torch = pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")

    class Config:
        """Stands for the type of an argument that is not given."""

    known = {
        "torch": torch,
        "np": np,
        "defaultdict": defaultdict,
        "Optional": Optional,
        "AlgoConfig": Config,
        "register_adv_est": lambda _: lambda function: function,
        "AdvantageEstimator": type("AdvantageEstimator", (), {"GRPO": "grpo"}),
    }
    name = "compute_grpo_outcome_advantage"
    advantage = lifted("verl", VERSION, "verl/trainer/ppo/core_algos.py", (name,), known)[name]
    proto = recipe(SimpleNamespace)(BATCH[:1], **LENGTHS)
    advantages, _ = advantage(proto.batch["rm_scores"], proto.batch["response_mask"], proto.non_tensor_batch["uid"])
    expected = (np.array([0.25, 1.0]) - 0.625) / (np.std([0.25, 1.0], ddof=1) + 1e-6)
    assert np.allclose(advantages.numpy(), expected[:, None] * proto.batch["response_mask"].numpy())


WHOLE_BATCH = """
from finished_groups import chat, group, with_tool

batch = [group("a", chat([1, 2], [3, 4], 0.25), with_tool(1.0)), group("b", chat([1], [2, 3, 4], version=7))]
proto = data_proto(batch, prompt_length=5, response_length=8, pad_token_id=77)
print(len(proto), proto.batch["responses"][1].tolist(), proto[[1, 2]].non_tensor_batch["uid"].tolist())
"""


@pytest.mark.proof
def test_verl_takes_the_whole_batch(tmp_path: Path) -> None:
    found = environment(tmp_path)
    found["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parents[1]}"
    command = [framework_python("trainers"), "-c", RECIPE + WHOLE_BATCH]
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.splitlines()[-1] == "3 [10, 11, 8, 20, 21, 9, 12, 77] ['a', 'b']", done.stderr
