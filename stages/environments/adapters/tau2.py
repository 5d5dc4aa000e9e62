"""tau2: the domains of tau2-bench. Two players: `agent`, and `user`, which another model plays.

An instance's args:

- `domain`, and `task`, the task's id.
- `max_steps`: the most messages of both players and of tools together (200).
- `ignore`: parts of the reward that do not count. The part `NL_ASSERTION`, which a language model judges, must be among
  them in tasks that have it.
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
        self.domain, name, self.max_steps = args["domain"], str(args["task"]), args.get("max_steps", MAX_STEPS)
        self.task: Any = next((task for task in registry.get_tasks_loader(self.domain)() if task.id == name), None)
        if self.task is None:
            raise LookupError(f"the tau2 domain {self.domain} has no task {name!r}")
        start, judged_by = self.task.initial_state, self.task.evaluation_criteria
        if judged_by is not None:
            parts = [part for part in judged_by.reward_basis if part.value not in args.get("ignore", ())]
            if "NL_ASSERTION" in parts:
                raise ValueError(f"a language model judges the tau2 task {name}, unless args.ignore has NL_ASSERTION")
            judged_by = judged_by.model_copy(update={"reward_basis": parts})
            self.task = self.task.model_copy(update={"evaluation_criteria": judged_by})
        if start is not None and start.message_history:
            raise ValueError(f"the tau2 task {name} begins in the middle of a conversation")
        self.world = registry.get_env_constructor(self.domain)()
        if start is not None:
            self.world.set_state(start.initialization_data, start.initialization_actions, [])
        self.began, self.errors, self.ended = get_now(), 0, TerminationReason.MAX_STEPS
        self.messages: list[Any] = [DEFAULT_FIRST_AGENT_MESSAGE.model_copy(update={"timestamp": self.began})]
        tools = self.world.get_tools()
        user_tools = self.world.get_user_tools(include=self.task.user_tools) if self.world.user_tools else []
        agent = LLMAgent(tools=tools, domain_policy=self.world.get_policy(), llm="")
        user = UserSimulator(llm="", instructions=str(self.task.user_scenario), tools=user_tools or None)
        greeting = self.messages[0].content
        self.opening = [
            {"role": "system", "content": agent.system_prompt},
            {"role": "assistant", "content": greeting},
        ]
        persona = {"role": "system", "content": user.system_prompt}
        functions = [{**tool.openai_schema["function"], "players": ["agent"]} for tool in tools]
        functions += [{**tool.openai_schema["function"], "players": ["user"]} for tool in user_tools]
        return {"observations": {"user": [persona, {"role": "user", "content": greeting}]}, "tools": functions}

    def step(self, player: str, text: str) -> dict[str, Any]:
        if not text.strip():
            self.ended = TerminationReason.AGENT_ERROR
            return {"mask": "the user's model said nothing"} if player == "user" else {"done": True}
        message = AssistantMessage(role="assistant", content=text)
        if player == "user":
            message = UserMessage(role="user", content=text)
            if UserSimulator.is_stop(message):
                self.ended = TerminationReason.USER_STOP
        self.messages.append(message)
        if self.ended is TerminationReason.USER_STOP or self._is_over():
            return {"done": True}
        seen, self.opening = [*self.opening, {"role": "user", "content": text}], []
        return {"observations": {"agent": seen} if player == "user" else {"user": text}}

    def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        requestor = "user" if player == "user" else "assistant"
        call = ToolCall(id=f"call_{len(self.messages)}", name=name, arguments=arguments, requestor=requestor)
        made = UserMessage if player == "user" else AssistantMessage
        result = self.world.get_response(call)
        self.messages += [made(role=requestor, tool_calls=[call]), result]
        self.errors += bool(result.error)
        return {"observations": {player: result.content}, "done": self._is_over()}

    def _is_over(self) -> bool:
        if self.errors >= MAX_ERRORS:
            self.ended = TerminationReason.TOO_MANY_ERRORS
        return self.errors >= MAX_ERRORS or len(self.messages) > self.max_steps

    def close(self) -> dict[str, Any]:
        run = SimulationRun(
            id="rollout",
            task_id=self.task.id,
            start_time=self.began,
            end_time=get_now(),
            duration=0.0,
            termination_reason=self.ended,
            messages=self.messages,
        )
        judged = evaluate_simulation(run, self.task, EvaluationType.ALL, False, self.domain)
        parts = {str(getattr(name, "value", name)): part for name, part in (judged.reward_breakdown or {}).items()}
        return {"rewards": {"agent": judged.reward}, "info": {**parts, "ended": self.ended.value}}
