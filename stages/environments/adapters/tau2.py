"""tau2: the domains of tau2-bench. Two players: `agent`, and `user`, which another model plays.

An instance's args: `domain`; `task`, the task's id; `max_steps`, the most messages of both players and of tools (200);
`ignore`, parts of the reward that do not count. The part `NL_ASSERTION`, which a language model judges, must be among
these in tasks that have it.
"""

from __future__ import annotations

from typing import Any

from tau2.agent.llm_agent import LLMAgent
from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE
from tau2.registry import registry
from tau2.user.user_simulator import UserSimulator
from tau2.utils.utils import get_now

MAX_STEPS, MAX_ERRORS = 200, 10


class Tau2:
    own_thread = True

    def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        del seed  # nothing in it is drawn
        self.domain, self.max_steps, self.began = args["domain"], args.get("max_steps", MAX_STEPS), get_now()
        self.task = task = _task(self.domain, str(args["task"]), args.get("ignore", ()))
        self.errors, self.ended = 0, TerminationReason.MAX_STEPS
        self.world = registry.get_env_constructor(self.domain)()
        if (start := task.initial_state) is not None:
            self.world.set_state(start.initialization_data, start.initialization_actions, [])
        tools = self.world.get_tools()
        user_tools = self.world.get_user_tools(include=task.user_tools) if self.world.user_tools else []
        agent = LLMAgent(tools=tools, domain_policy=self.world.get_policy(), llm="")
        user = UserSimulator(llm="", instructions=str(task.user_scenario), tools=user_tools or None)
        self.messages: list[Any] = [DEFAULT_FIRST_AGENT_MESSAGE.model_copy(update={"timestamp": self.began})]
        greeting = self.messages[0].content
        self.opening = [_message("system", agent.system_prompt), _message("assistant", greeting)]
        functions = [
            {**tool.openai_schema["function"], "players": [player]}
            for player, offered in (("agent", tools), ("user", user_tools))
            for tool in offered
        ]
        seen = [_message("system", user.system_prompt), _message("user", greeting)]
        return {"observations": {"user": seen}, "tools": functions}

    def step(self, player: str, text: str) -> dict[str, Any]:
        is_user = player == "user"
        if not text.strip():
            self.ended = TerminationReason.AGENT_ERROR
            return {"mask": "the user's model said nothing"} if is_user else {"done": True}
        made = UserMessage if is_user else AssistantMessage
        self.messages.append(made(role="user" if is_user else "assistant", content=text))
        if is_user and UserSimulator.is_stop(self.messages[-1]):
            self.ended = TerminationReason.USER_STOP
            return {"done": True}
        seen, self.opening = ([*self.opening, _message("user", text)], []) if is_user else (text, self.opening)
        return {"done": True} if self._is_over() else {"observations": {"agent" if is_user else "user": seen}}

    def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        made, role = (UserMessage, "user") if player == "user" else (AssistantMessage, "assistant")
        call = ToolCall(id=f"call_{len(self.messages)}", name=name, arguments=arguments, requestor=role)
        result = self.world.get_response(call)
        self.messages += [made(role=role, tool_calls=[call]), result]
        self.errors += bool(result.error)
        return {"observations": {player: result.content}, "done": self._is_over()}

    def _is_over(self) -> bool:
        if self.errors >= MAX_ERRORS:
            self.ended = TerminationReason.TOO_MANY_ERRORS
        return self.errors >= MAX_ERRORS or len(self.messages) > self.max_steps

    def close(self) -> dict[str, Any]:
        times = {"start_time": self.began, "end_time": get_now(), "duration": 0.0}
        ended = {"termination_reason": self.ended, "messages": self.messages}
        run = SimulationRun(id="rollout", task_id=self.task.id, **times, **ended)
        judged = evaluate_simulation(run, self.task, EvaluationType.ALL, False, self.domain)
        parts = {str(getattr(name, "value", name)): part for name, part in (judged.reward_breakdown or {}).items()}
        return {"rewards": {"agent": judged.reward}, "info": {**parts, "ended": self.ended.value}}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _task(domain: str, name: str, ignored: Any) -> Any:
    task: Any = next((task for task in registry.get_tasks_loader(domain)() if task.id == name), None)
    if task is None:
        raise LookupError(f"the tau2 domain {domain} has no task {name!r}")
    if task.initial_state is not None and task.initial_state.message_history:
        raise ValueError(f"the tau2 task {name} begins in the middle of a conversation")
    if (criteria := task.evaluation_criteria) is None:
        return task
    parts = [part for part in criteria.reward_basis if part.value not in ignored]
    if "NL_ASSERTION" in parts:
        raise ValueError(f"a language model judges the tau2 task {name}, unless args.ignore has NL_ASSERTION")
    return task.model_copy(update={"evaluation_criteria": criteria.model_copy(update={"reward_basis": parts})})
