"""`prorl job --turns` and `--follow`: the turns of a job so far."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.text import Text

from ..data.conversations import labels_of
from ..data.last_turns import turns_from
from ..data.printed import turn_label
from ..data.trajectory import Role, TokenArrays
from ..errors import ProrlError, UnknownJob
from ..evaluation.display import ROLE_STYLES, turn_body
from ..evaluation.transcript import TextReader, make_transcript
from ..inference.chat.loading import load_chat_format
from ..service.rollout_brokers import the_answer
from ..system.logs import one_line
from ..wire.messages.backends import ListBackends
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from ..service.rollout_brokers import RolloutBrokers
    from ..wire.messages.backends import BackendList
    from ..wire.messages.chat import ChatSettings
    from ..wire.messages.watching import TurnsPeeked

LOOK_S = 1.0
"""Seconds between looks."""


class JobTurns:
    """Prints the turns of one job, each once.

    Args:
        brokers: those of the service.
        job_id: the whole id.
        screen: where to print.
    """

    def __init__(self, brokers: RolloutBrokers, job_id: str, screen: Console) -> None:
        self._brokers = brokers
        self._job_id = job_id
        self._screen = screen
        self._readers: dict[str, TextReader | None] = {}
        """By backend."""
        self._attempt = 0
        self._printed = 0
        """Printed tokens of that attempt."""
        self._said = ""

    def show(self) -> bool:
        """Print the new turns; return whether more may come."""
        try:
            reply, arrays = the_answer(
                self._brokers.ask(
                    lambda client: client.views.turns(
                        self._job_id, known_attempt=self._attempt, known_tokens=self._printed
                    )
                )
            )
        except UnknownJob:
            self._show_result()
            return False
        self._say(_where(reply))
        if reply.attempt != self._attempt:
            self._attempt, self._printed = reply.attempt, 0
        if reply.so_far is not None and arrays is not None:
            before = reply.so_far.tokens - reply.so_far.shown_tokens
            if before > self._printed:
                self._say(f"… {before - self._printed} tokens before these are not shown")
            self._print(arrays, before, reply.so_far.turns - reply.so_far.shown_turns, reply.so_far.backend)
        return True

    def follow(self) -> None:
        while self.show():
            time.sleep(LOOK_S)

    def _show_result(self) -> None:
        try:
            result, trajectory = the_answer(self._brokers.ask(lambda client: client.views.peek(self._job_id)))
        except UnknownJob as error:
            self._say(error.message)
            return
        if result.attempt != self._attempt:
            self._printed = 0
        if self._printed and "harness" in result.notes:
            return  # training arrays are not laid out as the conversation was
        if trajectory is not None and len(trajectory.token_ids) > self._printed:
            self._print(turns_from(trajectory, 0), 0, 0, result.backend, labels_of(result, trajectory.turns))
        elif result.kept is not None:
            self._say(f"its tokens are on node {result.kept.node} until they are collected")

    def _print(
        self,
        arrays: TokenArrays,
        before: int,
        turns_before: int,
        backend: str,
        labels: Mapping[int, tuple[str, float | None]] | None = None,
    ) -> None:
        """Print the turns after the printed tokens; `before` tokens and `turns_before` turns precede the arrays.

        `labels` has the conversation and the reward of turns, if the job has ended and they have any.
        """
        arrays = _begun(arrays)
        new = turns_from(arrays, max(0, self._printed - before))
        transcript = make_transcript(self._job_id, new, self._reader(backend))
        for number, turn in enumerate(transcript.turns, start=turns_before + len(arrays.turns) - len(new.turns)):
            title = f"{number}  {turn_label(turn.role, *(labels or {}).get(number, ('', None)))}"
            title += f" · {turn.end - turn.start} tokens"
            self._screen.print()
            self._screen.print(Text(title, style=f"bold {ROLE_STYLES[turn.role]}"))
            self._screen.print(turn_body(turn, transcript))
        self._printed = max(self._printed, before + len(arrays.token_ids))

    def _reader(self, backend: str) -> TextReader | None:
        if backend not in self._readers:
            try:
                settings = self._settings(backend)
                self._readers[backend] = TextReader(load_chat_format(settings), settings)
            except ProrlError as error:
                self._say(f"there are token ids and no texts: {error.message}")
                self._readers[backend] = None
        return self._readers[backend]

    def _settings(self, backend: str) -> ChatSettings:
        listed: BackendList = the_answer(
            self._brokers.ask(lambda client: client.backends.ask(ListBackends(new_id()), LOOK_S))
        )
        found = {one.backend.chat for one in listed.backends if one.backend.backend_id == backend}
        found = found or {one.backend.chat for one in listed.backends}
        if len(found) != 1:
            raise UnknownJob(f"the backend {backend} is gone, and no other can read its tokens")
        return found.pop()

    def _say(self, line: str) -> None:
        if line and line != self._said:
            self._said = line
            self._screen.print(Text(one_line(line), style="dim"))


def _begun(arrays: TokenArrays) -> TokenArrays:
    """Omit the last turn if it is the policy's and has only the chat template's opening."""
    if len(arrays.turns):
        start, end, role = arrays.turns[-1].tolist()
        if role == Role.ASSISTANT and not arrays.loss_mask[start:end].any():
            return TokenArrays(
                arrays.token_ids[:start],
                arrays.loss_mask[:start],
                arrays.logprobs[:start],
                arrays.weight_versions[:start],
                arrays.turns[:-1],
            )
    return arrays


def _where(reply: TurnsPeeked) -> str:
    """Return a line with the state of a job without turns; empty: it has turns."""
    if reply.so_far is not None and reply.so_far.tokens:
        return ""
    if reply.place == "queued":
        return f"it waits in the queue of {reply.phase.upper()}, attempt {reply.attempt}"
    return f"it is in {reply.phase.upper()} on {reply.node}, attempt {reply.attempt}; nothing has been said yet"
