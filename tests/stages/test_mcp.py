"""Jobs with MCP servers, in a whole service: the server is a program of the job's sandbox, the engine says a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mcp_servers import SMALL, small
from support.sandboxes import main_kind

from prorl_zmq import Job, Outcome
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.wire.messages.jobs import McpServer, Outside

if TYPE_CHECKING:
    from prorl_zmq.data.trajectory import Trajectory

pytestmark = pytest.mark.proof
ADD = tool_call("add", a=1, b=2)


def shell(*servers: McpServer, **more: Any) -> Job:
    instance = {"instruction": "Add.", "check": "true", "files": {SMALL.name: SMALL.read_text()}}
    return Job(task="shell", instance=instance, mcp=servers, **more)


def ended(*turns: str, job: Job) -> Trajectory:
    with LocalService(engine=say(*turns), sandbox=main_kind()) as service, service.client() as client:
        client.submit(job)
        (trajectory,) = client.collect(1, wait_s=100)
        return trajectory


def text(trajectory: Trajectory) -> str:
    return EmbeddedChatFormat().decode(trajectory.token_ids)


def test_the_policy_calls_the_tools_of_a_server_beside_the_tasks_own() -> None:
    trajectory = ended(ADD, tool_call("bash", command="echo $((40 + 2))"), ADD, "Done.", job=shell(small("")))
    assert trajectory.result.outcome == Outcome.COMPLETED, trajectory.result.error
    assert trajectory.result.metrics["tool_calls"] == 3
    said = text(trajectory)
    assert said.index("3, call 1") < said.index("42") < said.index("3, call 2")
    assert {"tool.add", "tool.bash"} <= trajectory.result.timings.keys()


def test_a_task_without_a_sandbox_gets_one_for_the_server() -> None:
    server = McpServer(name="shop", command=("python3", "-c", SMALL.read_text()))
    job = Job(task="math", instance={"problem": "1 + 2?", "ground_truth": "3"}, mcp=(server,))
    trajectory = ended(ADD, "It is \\boxed{3}.", job=job)
    assert (trajectory.result.reward, trajectory.result.error) == (1.0, None)
    assert "3, call 1" in text(trajectory)


def test_a_server_that_dies_gives_no_reward() -> None:
    trajectory = ended(ADD, "Done.", job=shell(small("dies"), max_attempts=2))
    result = trajectory.result
    assert (result.outcome, result.reward, result.attempt) == (Outcome.INFRASTRUCTURE_ERROR, None, 2)
    assert result.error is not None
    assert result.error.code == "tool_session_lost"
    assert "the MCP server shop ended: it exited with 1; its last words: out of paper" in result.error.message


def test_an_agent_that_kills_the_server_earns_nothing() -> None:
    kill = tool_call("bash", command="kill -9 $(cat /proc/[0-9]*/stat | grep -m1 python3 | cut -d' ' -f1); sleep 0.2")
    trajectory = ended(kill, ADD, "Done.", job=shell(small("")))
    assert (trajectory.result.outcome, trajectory.result.reward) == (Outcome.FAILED, 0.0)
    assert trajectory.result.error is not None
    assert "it was killed by signal 9" in trajectory.result.error.message


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            shell(McpServer(name="a", url="http://127.0.0.1:1/mcp")),
            "not among the service's [[mcp]] addresses: none",
        ),
        (shell(small("", tools=("add", "sell"))), "the MCP server shop has no tool sell; it has add"),
        (shell(small(""), harness="aider"), "the harness aider has no MCP client"),
        (shell(McpServer(name="a", url="http://x/mcp"), harness="codex"), "a harness cannot reach the MCP server a"),
        (shell(small("", tools=("add",)), harness="codex"), "a harness takes all tools of the MCP server shop"),
        (shell(small(""), outside=Outside(key_sha256="0" * 64)), "a program outside cannot use MCP servers"),
    ],
)
def test_what_cannot_work_is_said(job: Job, words: str) -> None:
    result = ended("Done.", job=job).result
    assert (result.outcome, result.reward, result.attempt) == (Outcome.FAILED, None, 1)
    assert result.error is not None
    assert result.error.code == "invalid_job"
    assert words in result.error.message
