"""`RolloutManager`: verl's agent-loop manager, whose rollouts are the service's.

It lives in verl's `TaskRunner` actor, beside the trainer, and has a thread with an asyncio loop; a call of
`generate_sequences` is a task there, with a client of its own, for each size of groups. The service replaces jobs that
bring no reward. A prompt that still has none is reported as verl's `failure`, never as a reward of 0.

If the service is away, its prompts wait for it, up to `away_s`. What cannot get better (a job that the service refuses,
batches of which nothing came) ends the training: `wait` raises it in the trainer's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from ...client.asynchronous.client import AsyncRolloutClient
from ...errors import ConfigError, NotTrainable, RequestTimeout, UnknownBatch
from ...wire.messages.jobs import Sampling
from ..dataset_rows import of_prompt
from ..sampling import sampling_of
from ..session import Counts, Outage, why_given_up
from .options import job_maker_of, rollout_options, service_options
from .prompts import Prompt, prompts_of

if TYPE_CHECKING:
    from ...data.group import Group
    from ...wire.messages.jobs import Job

log = logging.getLogger("prorl.trainer")

GIVEN_UP = 32
"""So many prompts that fail, or whose rollouts are too long, with none between them that does not, are no accident."""
CLOSE_S = 60.0


class RolloutManager(Counts):
    """Rolls out verl's prompts by the service: `rollout.agent.agent_loop_manager_class`.

    Args:
        config: verl's whole configuration; `options` lists our keys.

    Raises:
        ConfigError: a key of ours is unknown or has a wrong value.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.options = rollout_options(config)
        self.service = service_options(config)
        self._rollout = config.actor_rollout_ref.rollout
        self._most_tokens = self._rollout.prompt_length + self._rollout.response_length
        self._make_job = job_maker_of(config)
        self.waiting: deque[Prompt] = deque()
        """Prompts for a `DynamicReplayBuffer`, which rolls them out itself."""
        self._failure: Exception | None = None
        self._why = ""
        self._given_up = 0
        """Since the last batch of which something came."""
        self._untrainable = 0
        """Groups since the last one with enough rollouts that are short enough."""
        self._changed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: object = None,  # noqa: ARG003 - verl passes it, as the two below
        teacher_client: object = None,
        reward_loop_worker_handles: object = None,  # noqa: ARG003
    ) -> RolloutManager:
        """Make one; verl's clients of its own engines are not used.

        Raises:
            ConfigError: a key of ours is wrong, or distillation is on: teachers need verl's own agent loops.
        """
        if teacher_client is not None:
            raise ConfigError("distillation is not done here: set distillation.enabled=False", key="distillation")
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """Begin to roll out a `TensorDict` of prompts, and return; their rows come into verl's TransferQueue.

        Raises:
            InvalidJob: a row of the data set makes no job.
        """
        found = prompts_of(prompts)
        jobs = [self.job(prompt) for prompt in found]
        if self.options.keep != "all" and found[0].partition == "train":
            self.waiting.extend(found)
            return
        sizes = [self._size(prompt) for prompt in found]
        by_size = sorted(zip(sizes, found, jobs, strict=True), key=lambda entry: entry[0])
        for size, entries in groupby(by_size, lambda entry: entry[0]):
            asked = {job.job_id: (prompt, job) for _, prompt, job in entries}
            asyncio.run_coroutine_threadsafe(self._roll_out(asked, size), self._loop)

    def job(self, prompt: Prompt) -> Job:
        """Make a prompt's job, whose id is the prompt's `uid`; how tokens are drawn is verl's configuration."""
        drawn = self._rollout.val_kwargs if prompt.partition == "val" else self._rollout
        sampling = sampling_of({name: drawn.get(name) for name in ("temperature", "top_p", "top_k")})
        if prompt.partition == "train" and not prompt.columns.get("__do_sample__", True):
            sampling = Sampling(temperature=0.0)
        return msgspec.structs.replace(of_prompt(self._make_job(prompt.columns), sampling), job_id=prompt.uid)

    def put(self, prompt: Prompt, group: Group) -> dict[str, dict[str, Any]]:
        """Put a prompt's rows into the queue; return their tags by their keys: none, if they are too long.

        In an evaluation no row is too long: its score is of all.

        Raises:
            NotTrainable: so were the rows of too many prompts before it.
        """
        if prompt.partition == "val":
            return prompt.put(group, None, self.options.too_long).tags
        rows = prompt.put(group, self._most_tokens, self.options.too_long)
        for what, number in rows.counts.items():
            self.count(what, number)
        with self._lock:
            self._untrainable = untrainable = 0 if rows.tags else self._untrainable + 1
        if not rows.tags:
            log.warning("of prompt %s too few rollouts have at most %d tokens", prompt.uid, self._most_tokens)
        if untrainable >= GIVEN_UP:
            raise NotTrainable(f"of the last {untrainable} groups each has too few rollouts that are short enough")
        return rows.tags

    def wait(self, timeout_s: float) -> None:
        """Wait until a prompt has ended.

        Raises:
            ProrlError: what ended the rollouts.
        """
        self._changed.wait(timeout_s)
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Cancel what is under way, and end the thread; verl's TransferQueue must still be open."""
        try:
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(CLOSE_S)
        except TimeoutError:
            log.warning("rollouts that are under way could not be cancelled within %.0f s", CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt in training."""
        return int(self._rollout.n)

    def _size(self, prompt: Prompt) -> int:
        size = self._rollout.val_kwargs.n if prompt.partition == "val" else self.group_size
        return int(prompt.columns.get("__rollout_n__", size))

    async def _roll_out(self, asked: dict[str, tuple[Prompt, Job]], size: int) -> None:
        """Roll out prompts, each of which is reported as `finished` or `failure`."""
        try:
            outage = Outage(self.options.away_s)
            for prompt, _ in asked.values():
                await asyncio.to_thread(prompt.set_status, "running")
            number = len(asked)
            while asked:
                try:
                    came = await self._one_batch(asked, size, outage)
                except (RequestTimeout, UnknownBatch) as error:
                    await asyncio.sleep(outage.pause_s(error))
                    continue
                self._given_up = 0 if came else self._given_up + number
                if self._given_up >= GIVEN_UP:
                    raise NotTrainable(f"none of {self._given_up} prompts could be rolled out ({self._why})")
        except Exception as error:  # noqa: BLE001 - raised by `wait`, in the trainer's thread
            self._failure = self._failure or error
            self._changed.set()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Its threads would be waited for at the process's end, when the queue no longer answers them.
        await asyncio.get_running_loop().shutdown_default_executor()

    async def _one_batch(self, asked: dict[str, tuple[Prompt, Job]], size: int, outage: Outage) -> bool:
        """Take prompts out of `asked` as they end; return whether a group came."""
        options = {**self.options.batch, "keep": "all", "carry": "nothing", "adopt": False, "max_given_up": 2**31 - 1}
        came = False
        async with (
            AsyncRolloutClient(self.service.endpoint, keys=self.service.keys) as client,
            await client.open_batch(len(asked), size, **options) as batch,
        ):
            outage.end()
            batch.feed([job for _, job in asked.values()])
            async for group in batch:
                came = True
                prompt, _ = asked.pop(group.prompt_id)
                trainable = await asyncio.to_thread(self.put, prompt, group)
                await self._end(prompt, "finished" if trainable else "failure")
                await self._give_up(asked, {one.prompt_id for one in batch.report.given_up} if batch.report else set())
            self._why = why_given_up(batch.report)
        await self._give_up(asked, set(asked))
        return came

    async def _give_up(self, asked: dict[str, tuple[Prompt, Job]], prompt_ids: set[str]) -> None:
        for prompt_id in prompt_ids & asked.keys():
            prompt, _ = asked.pop(prompt_id)
            log.warning("prompt %s could not be rolled out; `prorl job` shows a job's way", prompt.uid)
            if prompt.partition == "train":
                self.count("given_up")
            await self._end(prompt, "failure")

    async def _end(self, prompt: Prompt, status: str) -> None:
        await asyncio.to_thread(prompt.set_status, status)
        self._changed.set()
