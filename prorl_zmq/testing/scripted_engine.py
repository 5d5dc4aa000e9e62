"""`say`: an inference engine that returns what a test wants, in the embedded chat format; `tool_call` writes a call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import EngineFailed, InvalidWeights
from ..inference.engine import EngineDescription
from ..inference.local_engine import LocalEngine
from ..inference.tokenizer import IM_END, SPECIAL_TOKENS, TOOL_CALL, TOOL_CALL_END, VOCABULARY_SIZE, decode, encode
from ..inference.tool_calls.formats import HERMES
from ..wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from ..inference.local_engine import Running

    Script = Callable[[str], str]

CONTEXT_TOKENS = 1_000_000
MAX_IN_FLIGHT = 1024
JOBS_LIMIT = 10_000
"""Jobs whose place in the script is remembered."""

_CALL_TOKENS = {SPECIAL_TOKENS[token]: token for token in (TOOL_CALL, TOOL_CALL_END)}
_CALL_MARKS = re.compile(f"({'|'.join(_CALL_TOKENS)})")


def say(*turns: str | Script, context_tokens: int = CONTEXT_TOKENS) -> ScriptedEngine:
    """Return an engine that says the given turns, or what a function returns for a prompt.

    Args:
        turns: texts, of which each job gets the first for its first prompt, and so on; a job that asks for more fails
            with `infrastructure_error`, which says so. Or one function: it gets the text of the prompt, with the chat
            format's marks, and returns the turn. The service waits while it runs. A turn calls tools with the text of
            `tool_call`.
        context_tokens: most tokens of a prompt and its answer together.

    Raises:
        TypeError: `turns` are neither texts nor one function.
    """
    if len(turns) == 1 and callable(turns[0]):
        return ScriptedEngine(turns[0], context_tokens)
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"say(…) takes one or more texts, or one function of the prompt's text; not {turns!r}")
    return ScriptedEngine(tuple(map(str, turns)), context_tokens)


def tool_call(name: str, /, **arguments: Any) -> str:
    """Return the text with which a turn calls a tool."""
    return HERMES.write(name, arguments)


def tokens_of(turn: str) -> list[int]:
    """Return the ids of a turn of the policy, with the token that ends it."""
    parts = (
        [_CALL_TOKENS[part]] if part in _CALL_TOKENS else encode(part).tolist() for part in _CALL_MARKS.split(turn)
    )
    return [*(token for part in parts for token in part), IM_END]


@dataclass(slots=True)
class _Progress:
    """How far a job is in the script."""

    opening: list[int]
    """Its first prompt."""
    prompt: list[int] = field(default_factory=list)
    """Its last one."""
    answer: list[int] = field(default_factory=list)
    """To the last one."""
    turns: int = 0

    def rest(self, prompt: list[int]) -> list[int]:
        """Return what is left of the last answer, if the prompt is the last one with a part of it."""
        begun = prompt[len(self.prompt) :]
        is_part = prompt[: len(self.prompt)] == self.prompt and begun == self.answer[: len(begun)]
        return self.answer[len(begun) :] if is_part else []


class ScriptedEngine(LocalEngine):
    """Implements `engine.Engine`; `say` makes it.

    Sampling changes nothing but `max_tokens` and `stop_token_ids`, which end a turn early. The log-prob of token t is
    `-(1 + t) / 1000`. A job that is retried, so that its first prompt comes again, starts from the first turn. A turn
    that new weights interrupted is continued. New weights are any file or folder: only the version changes.
    """

    def __init__(self, script: Script | tuple[str, ...], context_tokens: int = CONTEXT_TOKENS) -> None:
        settings = ChatSettings()
        super().__init__(
            EngineDescription(
                "scripted", settings, context_tokens, VOCABULARY_SIZE, MAX_IN_FLIGHT, "processed_logprobs"
            ),
            weight_version=0,
        )
        self._script = script
        self._jobs: dict[str, _Progress] = {}
        self._answers: dict[Running, list[int]] = {}

    def _step(self) -> None:
        answers, self._answers = self._answers, {}
        for running in self._running:
            try:
                answer = answers.get(running) or self._next_answer(running.job_id, [*running.tokens])
            except EngineFailed as error:
                running.done.set_exception(error)
                continue
            self._answers[running] = answer
            said = len(running.logprobs)
            running.add(answer[said], -(1 + answer[said]) / 1000, self._weight_version)
            if said + 1 == len(answer):
                running.end("stop")

    def _next_answer(self, job_id: str, prompt: list[int]) -> list[int]:
        job = self._jobs.get(job_id)
        if job is None or prompt == job.opening:
            job = self._jobs[job_id] = _Progress(prompt)
            if len(self._jobs) > JOBS_LIMIT:
                del self._jobs[next(iter(self._jobs))]
        elif rest := job.rest(prompt):
            return rest
        job.prompt, job.answer = prompt, tokens_of(self._turn(job_id, prompt, job.turns))
        job.turns += 1
        return job.answer

    def _turn(self, job_id: str, prompt: list[int], turn: int) -> str:
        if isinstance(self._script, tuple):
            if turn == len(self._script):
                raise EngineFailed(
                    f"job {job_id} asks for turn {turn + 1}, and the script has {turn}: give say(…) more turns, or a "
                    "function of the prompt",
                    refused=True,
                )
            return self._script[turn]
        try:
            said = self._script(decode(prompt))
        except Exception as error:
            words = f"the function of say(…) raised {type(error).__name__} for job {job_id}: {error}"
            raise EngineFailed(words, refused=True) from error
        if not isinstance(said, str):
            words = f"the function of say(…) returned {said!r} for job {job_id}; it has to return a text"
            raise EngineFailed(words, refused=True)
        return said

    def _read_weights(self, path: Path) -> None:
        if not path.exists():
            raise InvalidWeights(f"there are no weights at {path}", path=str(path))

    def _take_weights(self, weights: None) -> None:
        pass
