"""The `stem` task: a science question, optional tools, rules that judge, and a judge model where rules cannot.

Rules run in a grader process (`stem_answers.py`). Other answers go to the model named `judge` (`phase.judge`); without
one, they end in an infrastructure error. `search` uses the provider that the environment of the stage processes names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from ...errors import ConfigError, InvalidEndpoint
from ...tasks.stem import ROW_FORMATS, StemInstance
from ...tools.search import SearchTool
from ...tools.toolbox import ToolName
from ...wire.messages.jobs import Outcome
from ..chat_endpoint import ChatEndpoint
from ..handler import AgentHandler, EvalPhase, Evaluation, Failure, InitPhase, PhaseData, RunPhase
from ..judge import JUDGE
from .llm_judge import question_of, read_verdict
from .math import FINISH_MESSAGE, GRADE_S, check_ground_truth
from .math_answers import answer_of
from .stem_answers import Verdict, judged_by_rules
from .tool_episode import run_episode, start_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...tasks.row_format import RowFormat
    from ...tools.search import SearchProvider
    from ...wire.messages.jobs import Job

SYSTEM_MESSAGE = "Solve the problem. Put the final answer in \\boxed{}, with its unit if it has one."
CHOICE_MESSAGE = "Solve the problem. Put the letter of the right choice in \\boxed{}."
SEARCH_URL, SEARCH_KEY = "PRORL_SEARCH_URL", "PRORL_SEARCH_KEY"
TAVILY_KEY = "TAVILY_API_KEY"
"""Used if the other key is not set."""


class StemHandler(AgentHandler[StemInstance]):
    task = "stem"
    instance_type = StemInstance
    row_formats: ClassVar[tuple[RowFormat, ...]] = ROW_FORMATS

    def __init__(self) -> None:
        self._search: SearchProvider | None = None

    def lacks(self, job: Job, instance: StemInstance) -> str:
        """Describe the missing judge model, if the instance needs one and the job names none."""
        asked = instance.judge == "always" or (instance.kind == "text" and instance.judge == "undecided")
        unset = ChatEndpoint(JUDGE).unset() if asked and JUDGE not in job.models else ""
        if not unset:
            return ""
        return f"a judge model is needed for answers in words: set {unset}, or name a model of the service for `judge`"

    async def init(self, phase: InitPhase[StemInstance]) -> PhaseData:
        instance = phase.instance
        check_ground_truth(instance.ground_truth)
        if "search" in instance.tools:
            self._provider()
        return await start_tools(phase, _others(instance.tools), instance.image)

    async def run(self, phase: RunPhase[StemInstance]) -> PhaseData:
        instance = phase.instance
        search = [SearchTool(self._provider())] if "search" in instance.tools else []
        system = CHOICE_MESSAGE if instance.choices else SYSTEM_MESSAGE
        system += FINISH_MESSAGE if "finish" in instance.tools else ""
        episode = await run_episode(phase, _others(instance.tools), system, problem_text(instance), search)
        return {"answer": answer_of(episode.final_message, episode.last_text)}

    def stored_data(self, instance: StemInstance, notes: Mapping[str, str]) -> PhaseData | None:
        del instance
        return {"answer": notes["answer"]} if "answer" in notes else None

    async def eval(self, phase: EvalPhase[StemInstance]) -> Evaluation:
        """Judge the answer: reward 1.0 if it is right, 0.0 if not. The metric `judged` is 1.0 if a model judged."""
        instance, answer = phase.instance, str(phase.data.get("answer", ""))
        check_ground_truth(instance.ground_truth)
        notes = {"answer": answer, "ground_truth": instance.ground_truth}
        verdict: Verdict = "undecided"
        if instance.judge != "always" or not answer.strip():
            verdict = await phase.grade(
                judged_by_rules,
                instance.kind,
                instance.ground_truth,
                answer,
                list(instance.choices),
                instance.tolerance,
                timeout_s=GRADE_S,
                returns=Verdict,
            )
        if verdict != "undecided" or instance.judge == "never":
            return Evaluation(1.0 if verdict == "right" else 0.0, {"judged": 0.0}, notes)
        system, question = question_of(problem_text(instance), instance.ground_truth, answer)
        judgement = await phase.judge(question, system=system, read=read_verdict)
        return Evaluation(1.0 if judgement.value else 0.0, {"judged": 1.0}, notes)

    def init_exception(self, job: Job, error: Exception) -> Failure:
        """Return the outcome of a job whose INIT raised: missing settings of the service are not the policy's fault."""
        if isinstance(error, ConfigError | InvalidEndpoint):
            return Failure(Outcome.INFRASTRUCTURE_ERROR, error.info())
        return super().init_exception(job, error)

    def run_exception(self, job: Job, error: Exception) -> Failure:
        """Return the outcome of a job whose RUN raised: another stage process may lack settings that INIT's has."""
        return self.init_exception(job, error)

    async def close(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            await search.close()

    def _provider(self) -> SearchProvider:
        if self._search is None:
            from ...tools.http_search import TAVILY, HttpSearchProvider  # imports aiohttp

            key = next((name for name in (SEARCH_KEY, TAVILY_KEY) if os.environ.get(name, "").strip()), SEARCH_KEY)
            self._search = HttpSearchProvider(os.environ.get(SEARCH_URL, "").strip() or TAVILY, key)
        return self._search


def problem_text(instance: StemInstance) -> str:
    """Return the user message: the problem, and its choices with their letters."""
    choices = "\n".join(f"({chr(ord('A') + at)}) {each}" for at, each in enumerate(instance.choices))
    return f"{instance.problem}\n\n{choices}" if choices else instance.problem


def _others(names: Sequence[Any]) -> list[ToolName]:
    return [name for name in names if name in get_args(ToolName)]
