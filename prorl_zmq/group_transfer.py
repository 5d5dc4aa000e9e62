"""A trainer's side of vLLM's own weight transfer: the tensors of one version go to engines through a group of vLLM.

The group is made for one update, over the engines that live, by vLLM's trainer side (`WeightTransferTrainerFactory`).
It runs in a thread of its own, since NCCL waits for a dead process without end; its calls to the engines are done by
the thread that waits for it, because a client has one thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from .errors import ConfigError, EngineFailed, NoBackend, ProrlError, RequestTimeout, UpdateNotBegun
from .system.installation import how_to_install

try:
    from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    message = f"form='vllm' needs a recent vLLM in the trainer's environment too ({error}): {how_to_install('vllm')}"
    raise ConfigError(message, key="form") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .client.blocking.client import RolloutClient
    from .wire.messages.backends import Backend
    from .wire.messages.engines import TransferCall, UpdateMode

log = logging.getLogger("prorl.trainer")

ENDS_S = 5.0
"""Longest wait for the trainer's side of a group to end by itself."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call for the thread that has the client."""

    call: TransferCall
    info: dict[str, Any]
    done: Future[None]


class _Source(WeightSource):  # type: ignore[misc]
    """The tensors, put onto the trainer's accelerator one by one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._device = torch.accelerator.current_accelerator() or torch.device("cpu")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.to(self._device)


class _Engines:
    """What vLLM's trainer side calls, in any thread: all engines of the group as if they were one."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        """None: the transfer has ended."""
        self._given_up = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init", init_info)

    def start_weight_update(self) -> None:
        """Do nothing: the first `update` starts it, so that an engine is half loaded only from then on."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002 - the end has it
        self.call("finish", {})

    def call(self, call: TransferCall, info: dict[str, Any]) -> None:
        asked = _Asked(call, info, Future())
        self.asked.put(asked)
        if self._given_up:
            self.give_up()
        asked.done.result()

    def give_up(self) -> None:
        """Fail all calls from now on: they get no answer, and Python waits for vLLM's threads when it exits."""
        self._given_up = True
        with suppress(queue.Empty):
            while True:
                if (asked := self.asked.get_nowait()) is not None:
                    asked.done.set_exception(EngineFailed("the transfer was given up"))


def receivers_of(backends: list[Backend]) -> dict[str, int]:
    """Return the rank of each backend's first process in a group with the trainer, which has rank 0.

    Raises:
        NoBackend: there is none.
        ConfigError: one was started without a weight transfer, or with another backend of it than the others.
    """
    if not backends:
        raise NoBackend("no backend takes the weights now")
    for one in backends:
        if not one.transfer:
            message = f"backend {one.backend_id} was started without --weight-transfer-config, which form='vllm' needs"
            raise ConfigError(message, key="form")
        if one.transfer != backends[0].transfer:
            message = (
                f"the backends {backends[0].backend_id} and {one.backend_id} were started with the weight transfers "
                f"{backends[0].transfer} and {one.transfer}; a group has one"
            )
            raise ConfigError(message, key="form")
    ranks, rank = {}, 1
    for one in backends:
        ranks[one.backend_id] = rank
        rank += one.transfer_ranks
    return ranks


def nccl_group(world_size: int) -> TrainerInitInfo:
    """Return the trainer's part of a group of vLLM's backend `nccl`, which meets at this machine on a free port."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_ip, get_open_port

    return NCCLTrainerInitInfo(get_ip(), get_open_port(), world_size, rank=0)


def transfer(
    tensors: Mapping[str, torch.Tensor],
    group: TrainerInitInfo,
    ask: Callable[[TransferCall, str, float], None],
    limit_s: float,
) -> None:
    """Send tensors to all engines of one group; return when they have them and have left it.

    Args:
        tensors: all of the model, by the names of the served model.
        group: as vLLM's trainer side expects it.
        ask: has the engines do one call, with its info as JSON, within so many seconds.
        limit_s: longest transfer.

    Raises:
        ProrlError: as `ask` raises it.
        RequestTimeout: the transfer took longer.
        EngineFailed: vLLM's trainer side failed.
    """
    until = time.monotonic() + limit_s
    engines, failures = _Engines(), list[BaseException]()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)  # each thread has its own
            sender = WeightTransferTrainerFactory.trainer_init(group, client=engines, source=_Source(tensors))
            try:
                sender.send_weights()
                leaving = Thread(target=sender.shutdown, name="leave the weights' group", daemon=True)
                leaving.start()  # NCCL's processes leave together
                engines.call("leave", {})
                leaving.join(ENDS_S)  # the engines have the weights, and have left
            except BaseException:
                sender.shutdown()
                raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failures.append(error)
        finally:
            engines.asked.put(None)

    thread = Thread(target=run, name="send weights", daemon=True)
    thread.start()
    try:
        _answer(engines, ask, until)
    except BaseException:
        engines.give_up()
        thread.join(ENDS_S)
        raise
    if failures:
        cause = failures[0]
        raise EngineFailed(f"vLLM's weight transfer failed in the trainer: {cause!r}") from cause


def _answer(engines: _Engines, ask: Callable[[TransferCall, str, float], None], until: float) -> None:
    """Do the calls of a transfer until it has ended."""
    while True:
        try:
            asked = engines.asked.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise RequestTimeout("the trainer's group did not send the weights in time") from None
        if asked is None:
            return
        try:
            ask(asked.call, msgspec.json.encode(asked.info).decode(), max(0.001, until - time.monotonic()))
        except BaseException as error:
            asked.done.set_exception(error)
            raise
        asked.done.set_result(None)


def give(
    client: RolloutClient,
    tensors: Mapping[str, torch.Tensor],
    weight_version: int,
    *,
    model: str,
    mode: UpdateMode,
    group: Callable[[int], TrainerInitInfo],
    limit_s: float,
) -> None:
    """Do one update of all engines of a model: stop them, send the tensors, and have them continue.

    If an engine fails, the group is given up, and a new one is made: without an engine that has left or failed twice.

    Args:
        client: which holds the weights.
        tensors: as in `transfer`.
        weight_version: their version.
        model: whose engines.
        mode: what happens to running generations.
        group: gives the trainer's part of a group of so many processes.
        limit_s: longest update; each group has half of what is left of it.

    Raises:
        ConfigError: an engine has no weight transfer.
        ProrlError: as `RolloutClient.begin_weights` and `end_weights`, or all engines failed.
    """
    until = time.monotonic() + limit_s
    client.begin_weights(weight_version, mode, update_limit_s=limit_s, timeout_s=limit_s, model=model)
    try:
        listed = [one.backend for one in client.backends.list()]
        backends = [one for one in listed if one.name == model and not one.frozen]
        failures = Counter[object]()
        while True:
            ranks = receivers_of(backends)

            def ask(call: TransferCall, info: str, left_s: float, ranks: Mapping[str, int] = ranks) -> None:
                client.transfer_weights(weight_version, call, info, ranks, timeout_s=left_s, model=model)

            world_size = 1 + sum(one.transfer_ranks for one in backends)
            try:
                transfer(tensors, group(world_size), ask, (until - time.monotonic()) / 2)
                break
            except (EngineFailed, NoBackend, RequestTimeout, UpdateNotBegun) as error:
                named = error.fields.get("backend")
                failures[named] += 1
                # An engine fails also if another one of its group dies.
                if failures[named] > 1 or not isinstance(error, EngineFailed) or error.fields.get("refused"):
                    others = [one for one in backends if one.backend_id != named]
                    if len(others) in (0, len(backends)):
                        raise
                    backends = others
                log.warning("%s; again, over %d engines", error.message, len(backends))
    except BaseException:
        with suppress(ProrlError):
            client.cancel_weights(weight_version, model=model)
        raise
    client.end_weights(weight_version, model=model, transferred=True)
