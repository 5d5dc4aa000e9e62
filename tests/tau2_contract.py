"""The part of tau2-bench 1.0.1 that the adapter uses, with one domain: the package is in no index.

Its names, arguments and rewards are those of the real package, whose domain `mock` this one imitates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import ModuleType
from typing import Any

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")


class Model:
    def model_copy(self, update: dict[str, Any]) -> Any:
        return replace(self, **update)  # type: ignore[type-var]


class TerminationReason(StrEnum):
    USER_STOP, AGENT_STOP, MAX_STEPS = "user_stop", "agent_stop", "max_steps"
    TOO_MANY_ERRORS, AGENT_ERROR = "too_many_errors", "agent_error"


class RewardType(StrEnum):
    DB, COMMUNICATE, NL_ASSERTION = "DB", "COMMUNICATE", "NL_ASSERTION"


class EvaluationType(StrEnum):
    ALL = "all"


@dataclass
class ToolCall:
    name: str
    arguments: dict[str, Any]
    id: str = ""
    requestor: str = "assistant"


@dataclass
class Said(Model):
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    timestamp: str = ""


class AssistantMessage(Said): ...


class UserMessage(Said): ...


@dataclass
class ToolMessage:
    id: str
    content: str
    requestor: str
    error: bool = False


@dataclass
class Criteria(Model):
    actions: list[ToolCall]
    communicate_info: list[str]
    reward_basis: list[RewardType]


@dataclass
class InitialState:
    initialization_data: None = None
    initialization_actions: None = None
    message_history: list[Said] | None = None


@dataclass
class Task(Model):
    id: str
    user_scenario: str
    evaluation_criteria: Criteria | None
    initial_state: InitialState | None = None
    user_tools: None = None


@dataclass
class SimulationRun:
    id: str
    task_id: str
    start_time: str
    end_time: str
    duration: float
    termination_reason: TerminationReason
    messages: list[Any]


@dataclass
class RewardInfo:
    reward: float
    reward_breakdown: dict[RewardType, float] | None = None


@dataclass
class Tool:
    name: str

    @property
    def openai_schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": f"Call {self.name}.", "parameters": {"type": "object"}}
        return {"type": "function", "function": function}


@dataclass
class Environment:
    made: list[dict[str, Any]] = field(default_factory=list)
    user_tools: Any = True

    def get_policy(self) -> str:
        return "Only existing users can create tasks."

    def get_tools(self) -> list[Tool]:
        return [Tool("create_task")]

    def get_user_tools(self, include: Any = None) -> list[Tool]:
        return [Tool("check_notifications")]

    def set_state(self, data: None, actions: None, history: list[Said]) -> None:
        assert (data, actions, history) == (None, None, [])

    def get_response(self, call: ToolCall) -> ToolMessage:
        known = {"assistant": "create_task", "user": "check_notifications"}
        if call.name != known[call.requestor]:
            return ToolMessage(call.id, f"Error: Tool '{call.name}' not found.", call.requestor, error=True)
        if call.requestor == "assistant":
            self.made.append(call.arguments)
        return ToolMessage(call.id, json.dumps(call.arguments), call.requestor)


class LLMAgent:
    def __init__(self, *, tools: list[Tool], domain_policy: str, llm: str) -> None:
        self.system_prompt = f"<policy>\n{domain_policy}\n</policy>"


class UserSimulator:
    def __init__(self, *, llm: str, instructions: str, tools: list[Tool] | None) -> None:
        self.system_prompt = f"<scenario>\n{instructions}\n</scenario>"

    @classmethod
    def is_stop(cls, message: Said) -> bool:
        return any(stop in (message.content or "") for stop in STOPS)


def evaluate_simulation(
    run: SimulationRun, task: Task, kind: EvaluationType, solo_mode: bool, domain: str
) -> RewardInfo:
    """The product of the parts in the basis; ends other than a stop have 0."""
    if run.termination_reason not in {TerminationReason.USER_STOP, TerminationReason.AGENT_STOP}:
        return RewardInfo(0.0)
    if (criteria := task.evaluation_criteria) is None:
        return RewardInfo(1.0)
    assert RewardType.NL_ASSERTION not in criteria.reward_basis, "a language model would be called"
    played, gold = Environment(), Environment()
    calls = [call for message in run.messages for call in getattr(message, "tool_calls", None) or ()]
    for world, made in ((played, calls), (gold, criteria.actions)):
        for call in made:
            world.get_response(call)
    said = " ".join(one.content for one in run.messages if isinstance(one, AssistantMessage) and one.content)
    parts = {
        RewardType.DB: float(played.made == gold.made),
        RewardType.COMMUNICATE: float(all(info in said for info in criteria.communicate_info)),
    }
    reward = 1.0
    for part in criteria.reward_basis:
        reward *= parts[part]
    return RewardInfo(reward, {part: parts[part] for part in criteria.reward_basis})


def _tasks() -> list[Task]:
    gold = [ToolCall("create_task", {"user_id": "user_1", "title": "Important Meeting"})]
    scenario = "Create a task called 'Important Meeting' for user_1."
    basis = [RewardType.DB, RewardType.COMMUNICATE]
    past = InitialState(message_history=[UserMessage("user", "Hello.")])
    return [
        Task("create_task_1", scenario, Criteria(gold, [], basis), InitialState()),
        Task("create_task_1_nl_eval", scenario, Criteria(gold, [], [*basis, RewardType.NL_ASSERTION])),
        Task("update_task_with_message_history", scenario, Criteria(gold, [], basis), past),
    ]


class Registry:
    def get_tasks_loader(self, name: str) -> Any:
        if name != "mock":
            raise KeyError(f"Task Set {name} not found in registry")
        return _tasks

    def get_env_constructor(self, name: str) -> Any:
        return Environment


def modules() -> dict[str, ModuleType]:
    """Return the package's modules, by name."""
    parts = {
        "tau2.agent.llm_agent": {"LLMAgent": LLMAgent},
        "tau2.data_model.message": {
            "AssistantMessage": AssistantMessage,
            "ToolCall": ToolCall,
            "UserMessage": UserMessage,
        },
        "tau2.data_model.simulation": {"SimulationRun": SimulationRun, "TerminationReason": TerminationReason},
        "tau2.evaluator.evaluator": {"EvaluationType": EvaluationType, "evaluate_simulation": evaluate_simulation},
        "tau2.orchestrator.orchestrator": {
            "DEFAULT_FIRST_AGENT_MESSAGE": AssistantMessage("assistant", "Hi! How can I help you today?")
        },
        "tau2.registry": {"registry": Registry()},
        "tau2.user.user_simulator": {"UserSimulator": UserSimulator},
        "tau2.utils.utils": {"get_now": lambda: "2026-11-27T20:00:00"},
    }
    made = {}
    for name, content in parts.items():
        made[name] = ModuleType(name)
        parent = name.rpartition(".")[0]
        if parent != "tau2":
            made[parent] = ModuleType(parent)
        vars(made[name]).update(content)
    return made
