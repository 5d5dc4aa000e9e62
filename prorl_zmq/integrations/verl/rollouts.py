"""`RolloutManager`: verl's agent-loop manager, with the service's rollouts.

It runs in verl's `TaskRunner` actor, next to the trainer. Each call of `generate_sequences` rolls out its prompts in a
thread, with its own client. A prompt that cannot be rolled out is reported as verl's `failure`, never as a reward of 0.
Permanent errors (an invalid job, batches without any group, a service that is unavailable for longer than `away_s`) end
the training: `wait` raises them in the trainer's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import get_non_tensor_data, list_of_dict_to_tensordict

from ...client.blocking.client import RolloutClient
from ...data.rows import rows_of
from ...errors import Closed, ConfigError, NotTrainable
from ...wire.messages.jobs import Sampling
from ...wire.records import EXPERTS
from ..dataset_rows import of_prompt
from ..recorded import NOTHING_ASKED, Asked
from ..sampling import sampling_of
from ..session import Counts, Sample, TrainerSession, why_given_up
from .options import job_maker_of, rollout_options, service_options
from .rows import output_of

if TYPE_CHECKING:
    from ...data.group import Group
    from ...wire.messages.jobs import Job

log = logging.getLogger("prorl.trainer")

GIVEN_UP = 32
"""This many consecutive prompts that fail, or whose rollouts are too long, are an error."""
CLOSE_S = 60.0
NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of verl's data set to roll out; its `uid` is its key in verl's TransferQueue."""

    uid: str
    partition: str
    """`train` or `val`."""
    columns: dict[str, Any]

    def set_status(self, status: str) -> None:
        """Report `running`, `finished`, or `failure`: there are no trainable rows."""
        tq.kv_put(key=self.uid, partition_id=self.partition, tag={"status": status})


class RolloutManager(Counts):
    """Rolls out verl's prompts by the service: `rollout.agent.agent_loop_manager_class`.

    Args:
        config: verl's whole configuration; `options` lists the service's keys.

    Raises:
        ConfigError: a key of the service is unknown or invalid.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.options = rollout_options(config)
        service = service_options(config)
        self._connect = partial(RolloutClient, service.endpoint, keys=service.keys)
        self._rollout = config.actor_rollout_ref.rollout
        self._most_tokens = self._rollout.prompt_length + self._rollout.response_length
        self._make_job = job_maker_of(config)
        self.asked = Asked.of("verl", (EXPERTS,), service.model, self.options.record)
        """What each training rollout must have."""
        self.waiting: deque[Prompt] = deque()
        """Prompts for a `DynamicReplayBuffer`, which rolls them out itself."""
        self._running: dict[threading.Thread, TrainerSession] = {}
        self._failure: Exception | None = None
        self._given_up = 0
        """Prompts since the last batch with any group."""
        self._untrainable = 0
        """Groups since the last one with enough short rollouts."""
        self._changed = threading.Event()

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: object = None,  # noqa: ARG003 - verl passes it, as the two below
        teacher_client: object = None,
        reward_loop_worker_handles: object = None,  # noqa: ARG003
    ) -> RolloutManager:
        """Make a manager; verl's clients of its own engines are not used.

        Raises:
            ConfigError: a key of the service is invalid, or distillation is on: teachers need verl's own agent loops.
        """
        if teacher_client is not None:
            raise ConfigError("distillation is not done here: set distillation.enabled=False", key="distillation")
        return cls(config)

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt in training."""
        return int(self._rollout.n)

    def session(self) -> TrainerSession:
        """Return a new session of the service."""
        return TrainerSession(self._connect, self.options.away_s)

    def generate_sequences(self, prompts: Any) -> None:
        """Start rolling out a `TensorDict` of prompts, and return; their rows are put into verl's TransferQueue.

        Raises:
            InvalidJob: a data set's row cannot be made into a job.
        """
        validate = get_non_tensor_data(prompts, "validate", default=False)
        columns = {name: value for name, value in prompts.items() if name != "validate"}
        found = []
        for index in range(len(prompts)):
            row = {name: _value(value, index) for name, value in columns.items()}
            found.append(Prompt(row["uid"], "val" if validate else "train", row))
        jobs = [self.job(prompt) for prompt in found]
        if self.options.keep != "all" and not validate:
            self.waiting.extend(found)
            return
        usual = self._rollout.val_kwargs.n if validate else self.group_size
        sizes = [int(prompt.columns.get("__rollout_n__", usual)) for prompt in found]
        by_size = sorted(zip(sizes, found, jobs, strict=True), key=lambda entry: entry[0])
        for size, entries in groupby(by_size, lambda entry: entry[0]):
            asked = {job.job_id: (prompt, job) for _, prompt, job in entries}
            session = self.session()
            thread = threading.Thread(target=self._run, args=(session, asked, size), name="rollouts", daemon=True)
            self._running[thread] = session
            thread.start()

    def job(self, prompt: Prompt) -> Job:
        """Make a prompt's job with the prompt's `uid` as id and the sampling of verl's configuration."""
        drawn = self._rollout.val_kwargs if prompt.partition == "val" else self._rollout
        sampling = sampling_of({name: drawn.get(name) for name in ("temperature", "top_p", "top_k")})
        if prompt.partition == "train" and not prompt.columns.get("__do_sample__", True):
            sampling = Sampling(temperature=0.0)
        asked = self.asked if prompt.partition == "train" else Asked(self.asked.model)
        return msgspec.structs.replace(
            asked.job(of_prompt(self._make_job(prompt.columns), sampling)), job_id=prompt.uid
        )

    def put(self, prompt: Prompt, group: Group) -> dict[str, dict[str, Any]]:
        """Put a prompt's rows into verl's queue; return their tags by key: empty if they are too long.

        Keys are `{uid}_{place in the group}_{segment}`, as in verl's `AgentLoopWorkerTQ`. Of self-play each role's
        rows have a `uid` and places of their own, so that verl's baselines are by role. In an evaluation no row is too
        long. If a role has one of several rollouts left, its rows are not put: it would have no baseline.

        Raises:
            NotTrainable: the rows of too many consecutive prompts were too long.
        """
        fields: list[dict[str, Any]] = []
        tags: dict[str, dict[str, Any]] = {}
        counts = Counter[str]()
        for number, role in enumerate(group.split(group.model)):
            uid = prompt.uid + role.group_id.removeprefix(group.group_id)
            samples, counted = self._samples(prompt, role, least=min(2, len(group)))
            counts += counted
            segments = Counter[int]()
            for sample in samples:
                place = number * len(group) + sample.row.place
                asked = self.asked if prompt.partition == "train" else NOTHING_ASKED
                fields.append({**_fields(sample, asked), **prompt.columns, "uid": uid, "session_id": place})
                tags[f"{prompt.uid}_{place}_{segments[place]}"] = _tag(sample, prompt)
                segments[place] += 1
        if tags:
            rows = list_of_dict_to_tensordict(fields)
            tq.kv_batch_put(keys=list(tags), fields=rows, tags=list(tags.values()), partition_id=prompt.partition)
        if prompt.partition == "train":
            self._note(prompt, counts, bool(tags))
        return tags

    def wait(self, timeout_s: float) -> None:
        """Wait until a prompt has ended, for at most `timeout_s` seconds.

        Raises:
            ProrlError: the error that ended the rollouts.
        """
        self._changed.wait(timeout_s)
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Cancel the running rollouts, and end the threads; verl's TransferQueue must still be open."""
        for session in self._running.values():
            session.stop()
        for thread in [*self._running]:
            thread.join(CLOSE_S)
            if thread.is_alive():
                log.warning("rollouts that are under way could not be cancelled within %.0f s", CLOSE_S)

    def _samples(self, prompt: Prompt, role: Group, least: int) -> tuple[list[Sample], Counter[str]]:
        """Return a role's samples and counts; no samples if fewer than `least` rollouts are left."""
        training = prompt.partition == "train"
        found: list[Sample] = []
        counts = Counter[str]()
        for row in rows_of([role]):
            most = self._most_tokens - row.prompt_tokens if training else None
            sample = Sample.of(row, most, self.options.too_long)
            counts["dropped" if not sample.length else "truncated" if sample.is_cut else "rows"] += 1
            if sample.length:
                found.append(sample)
        if len({sample.row.place for sample in found}) < least:
            return [], Counter(dropped=counts.total())
        return found, counts

    def _note(self, prompt: Prompt, counts: Counter[str], is_trainable: bool) -> None:
        for what, number in counts.items():
            self.count(what, number)
        with self._lock:
            self._untrainable = untrainable = 0 if is_trainable else self._untrainable + 1
        if not is_trainable:
            log.warning("of prompt %s too few rollouts have at most %d tokens", prompt.uid, self._most_tokens)
        if untrainable >= GIVEN_UP:
            raise NotTrainable(f"of the last {untrainable} groups each has too few rollouts that are short enough")

    def _run(self, session: TrainerSession, asked: dict[str, tuple[Prompt, Job]], size: int) -> None:
        try:
            with session:
                self._roll_out(session, asked, size)
        except Closed:
            pass  # by `close`
        except Exception as error:  # noqa: BLE001 - raised by `wait`, in the trainer's thread
            self._failure = self._failure or error
            self._changed.set()
        finally:
            self._running.pop(threading.current_thread(), None)

    def _roll_out(self, session: TrainerSession, asked: dict[str, tuple[Prompt, Job]], size: int) -> None:
        """Remove prompts from `asked` as they end, each as `finished` or `failure`."""
        number = len(asked)
        for prompt, _ in asked.values():
            prompt.set_status("running")

        def give_up(prompt_ids: set[str]) -> None:
            for prompt_id in prompt_ids & asked.keys():
                prompt, _ = asked.pop(prompt_id)
                log.warning("prompt %s could not be rolled out; `prorl job` shows a job's way", prompt.uid)
                if prompt.partition == "train":
                    self.count("given_up")
                self._end(prompt, "failure")

        options = {**self.options.batch, "keep": "all", "carry": "nothing", "adopt": False, "max_given_up": NEVER}
        asks = any(prompt.partition == "train" for prompt, _ in asked.values())
        options |= {"model": self.asked.model, "complete": self.asked.names if asks else ()}
        came = False
        for group in session.groups(lambda: (len(asked), [job for _, job in asked.values()]), size, **options):
            came = True
            prompt, _ = asked.pop(group.prompt_id)
            self._end(prompt, "finished" if self.put(prompt, group) else "failure")
            report = session.report
            give_up({one.prompt_id for one in report.given_up} if report is not None else set())
        give_up(set(asked))
        with self._lock:
            self._given_up = given_up = 0 if came else self._given_up + number
        if given_up >= GIVEN_UP:
            raise NotTrainable(f"none of {given_up} prompts could be rolled out ({why_given_up(session.report)})")

    def _end(self, prompt: Prompt, status: str) -> None:
        prompt.set_status(status)
        self._changed.set()


def _value(column: Any, index: int) -> Any:
    if isinstance(column, NonTensorStack):
        return column[index].data
    return column.data if isinstance(column, NonTensorData) else column[index]


def _fields(sample: Sample, asked: Asked) -> dict[str, Any]:
    """Return the fields that verl's own agent loops put for a text row."""
    fields = AgentLoopOutput(**output_of(sample, asked)).as_dict()
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    return {
        **fields,
        "loss_mask": fields["response_mask"],
        "rm_scores": torch.from_numpy(sample.token_rewards),
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "multi_modal_inputs": {},
    }


def _tag(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    tokens, versions = sample.row.prompt_tokens, sample.row.versions
    return {
        "status": "success",
        "prompt_len": tokens,
        "response_len": sample.length,
        "seq_len": tokens + sample.length,
        "global_steps": prompt.columns["global_steps"],
        "min_global_steps": versions[0],
        "max_global_steps": versions[-1],
    }
