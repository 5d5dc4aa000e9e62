"""`AsyncWeightUpdates`: updates the engines' weights for a trainer; a part of `AsyncRolloutClient`."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...errors import NoBackend, ProrlError, RequestTimeout, WeightsHeld
from ...wire.messages.backends import TAKE_BACK_S, HoldWeights
from ...wire.messages.base import POLICY, new_id
from ...wire.messages.engines import UPDATE_LIMIT_S, Receiver, WeightUpdate
from ..keep_alive import KeepAlive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...wire.messages.engines import TransferCall, UpdateMode, UpdateStep, UpdateTimes
    from ...wire.messages.relay import WeightRelay
    from .backends import AsyncBackends
    from .connection import AsyncServiceConnection

REPLY_SLACK_S = 1.0
"""How much later than its deadline the backend broker's reply may arrive."""
MAX_UPDATE_S = 7 * 86400.0
HOLD_S = 8.0
"""A trainer renews its lease on the weights four times in this time; the broker ends it after 15 s without renewal."""


class AsyncWeightUpdates:
    """Updates the weights of a service's engines. The first client to update a model holds its weights while it lives.

    Updates of that model by other clients raise `WeightsHeld`: they would change the version under the first one's
    batches. Each model has weight versions, a holder and updates of its own.
    """

    session: str
    timeout_s: float
    backends: AsyncBackends
    _service: AsyncServiceConnection
    _holding: dict[str, KeepAlive]
    """Renew the leases on the weights of models, by their names."""
    weight_version: int | None = None
    """The version of the policy that this client last reported as served; None: none yet."""

    async def begin_weights(
        self,
        version: int,
        mode: UpdateMode = "keep",
        *,
        update_limit_s: float = UPDATE_LIMIT_S,
        timeout_s: float | None = None,
        take_over: bool = False,
        model: str = POLICY,
    ) -> None:
        """Stop all generation of a model, to change its engines' weights yourself: by NCCL, a folder, your own RPC.

        When this returns, nothing is generated until `end_weights`. From the call on, jobs get no backend that does not
        serve the new version; those that need one wait for up to their `backend_wait_s`, and a paused generation spends
        its `generation_s`. A second call for the same version only restarts the limit.

        Args:
            version: the version of the new weights.
            mode: what happens to running generations. `keep`: they pause between two tokens, and resume with the new
                ones. `drain`: they end first, with the old weights. `abort`: they end at once, and the rest of their
                turns is generated with the new weights.
            update_limit_s: seconds without `end_weights` or `cancel_weights` after which engines resume with the
                version that they had. Includes the wait of `drain`.
            timeout_s: longest wait in seconds until generation has stopped; None: the client's `timeout_s`. With
                `drain`, allow for the longest turn. After it, the update is cancelled.
            take_over: take the weights from another trainer, whose updates are refused from then on.
            model: whose engines; other models' engines generate on.

        Raises:
            NoBackend: no backend serves the model, or all that do are frozen; so in the methods below.
            UpdateInProgress: another version was begun; its update is unchanged.
            WeightsHeld: another live trainer (`session`) holds the model's weights; so in the methods below.
            EngineFailed: an engine could not be stopped; `backend` names it, and all continue as before.
            RequestTimeout: the backend broker or an engine did not answer in time.
        """
        update = self._weight_update("begin", version, timeout_s, take_over=take_over, model=model)
        await self._ask_engines(replace(update, mode=mode, limit_s=update_limit_s))

    async def transfer_weights(
        self,
        version: int,
        call: TransferCall,
        info: str,
        receivers: Mapping[str, int],
        *,
        timeout_s: float | None = None,
        model: str = POLICY,
    ) -> None:
        """Have engines do one call of vLLM's own weight transfer; after `begin_weights`.

        `WeightsPublisher(form="vllm")` does all of them. They end with `end_weights(version, transferred=True)`.

        Args:
            version: as in `begin_weights`.
            call: `init`: join the group; `update`: take tensors; `finish`: all have come; `leave`: leave the group.
            info: JSON that vLLM's method expects.
            receivers: by the ids of the backends, the rank of each one's first process in the trainer's group.
            timeout_s: longest wait in seconds; an engine that is not done by then is lost. None: the client's
                `timeout_s`.
            model: as in `begin_weights`.

        Raises:
            UpdateNotBegun: this version was not begun.
            NoBackend: a receiver, named by `backend`, has left.
            EngineFailed: a receiver failed; `backend` names it. Others may still wait for the trainer's group.
            RequestTimeout: a receiver did not answer.
        """
        update = self._weight_update("transfer", version, timeout_s, take_over=False, model=model)
        ranks = tuple(Receiver(backend_id, rank) for backend_id, rank in receivers.items())
        await self._ask_engines(replace(update, call=call, info=info, receivers=ranks))

    async def end_weights(
        self,
        version: int,
        *,
        timeout_s: float | None = None,
        take_over: bool = False,
        model: str = POLICY,
        transferred: bool = False,
    ) -> None:
        """Resume generation with the weights that `begin_weights` named, which the engines now have.

        Backends that came after the begin and do not serve them get no jobs until they do. A second call does nothing.

        Args:
            version: as in `begin_weights`.
            timeout_s: longest wait in seconds for all engines; None: the client's `timeout_s`.
            take_over: as in `begin_weights`.
            model: as in `begin_weights`.
            transferred: engines that took no whole transfer of `transfer_weights` continue with the weights that they
                had, and get no jobs.

        Raises:
            UpdateNotBegun: this version was not begun, or the engines resumed after their limit.
            UpdateInProgress: another version was begun.
            EngineFailed: an engine could not resume; `backend` names it, the others have.
            RequestTimeout: a broker or an engine did not answer.
        """
        update = self._weight_update("end", version, timeout_s, take_over=take_over, model=model)
        await self._serve_weights(replace(update, transferred=transferred))

    async def cancel_weights(
        self, version: int, *, timeout_s: float | None = None, take_over: bool = False, model: str = POLICY
    ) -> None:
        """Cancel `begin_weights`: the weights have not changed, and the engines resume with them.

        Raises:
            UpdateInProgress: another version was begun.
            RequestTimeout: the backend broker or an engine did not answer.
        """
        await self._ask_engines(self._weight_update("cancel", version, timeout_s, take_over=take_over, model=model))

    async def update_weights(
        self,
        path: str | Path,
        weight_version: int,
        *,
        mode: UpdateMode = "keep",
        timeout_s: float | None = None,
        take_over: bool = False,
        model: str = POLICY,
        base: str = "",
        digest: str = "",
        relay: WeightRelay | None = None,
    ) -> dict[str, UpdateTimes]:
        """Have a model's backends load the weights at `path` (seen from the engine hosts): begin, load and end in one.

        Engine hosts first read them while they generate, for up to half of `timeout_s`; then each engine pauses, and
        resumes as soon as it has them. An engine that fails or lags while others succeed gets no jobs until it serves
        the version, or others serve its version. Return what the update cost each engine, by its backend's id.

        With a `model` that is no backend's own, the path is a LoRA adapter, and the model is this adapter from then on:
        `Job(model=model)`. Backends that have adapter slots (`lora` in `[[backends]]`) load it while they generate. A
        backend that fails gets no jobs of this model; its other jobs go on.

        Args:
            path: for vLLM a directory with safetensors of the model's own names and shapes; for the embedded engine an
                .npz file; for an adapter the folder that PEFT's `save_pretrained` wrote. A relative one begins at the
                caller's working directory.
            weight_version: their version, which every token that they generate carries.
            mode: what happens to running generations; see `begin_weights`. With an adapter they end with the version
                that they began with.
            timeout_s: longest wait in seconds for all backends; None: the client's `timeout_s`. With `drain`, allow for
                the longest turn.
            take_over: as in `begin_weights`.
            model: as in `begin_weights`.
            base: for a new adapter, the model that it adapts, if backends of several models have adapter slots.
            digest: the SHA-256 that the publisher of the weights gave them (`weights` in their index); engine hosts
                reject other content.
            relay: where engine hosts fetch the weights that do not see the path; with a digest.

        Raises:
            NoBackend: no backend serves the model and none takes adapters, or `base` is needed.
            UpdateInProgress: another version was begun.
            InvalidWeights: an engine rejected them and serves its old ones; `backend` names it.
            RequestTimeout: an engine did not answer; `backend` names it.
        """
        update = self._weight_update("load", weight_version, timeout_s, take_over=take_over, model=model)
        served = await self._serve_weights(
            replace(update, path=_absolute(path), mode=mode, base=base, digest=digest, relay=relay)
        )
        return dict(served.backends)

    async def remove_model(self, model: str, *, timeout_s: float | None = None, take_over: bool = False) -> None:
        """Remove an adapter from all engines; jobs that name it are refused from then on.

        Args:
            model: the adapter's.
            timeout_s: longest wait in seconds for all backends; None: the client's `timeout_s`.
            take_over: as in `begin_weights`.

        Raises:
            ModelInUse: unfinished jobs or open batches use it.
            NoBackend: no adapter of this name is published.
            ConfigError: it is the model of backends.
            WeightsHeld: another live trainer (`session`) publishes it.
            EngineFailed: an engine failed; `backend` names it. The model is removed, and the engine is asked again.
            RequestTimeout: a broker or an engine did not answer in time.
        """
        update = self._weight_update("remove", 0, timeout_s, take_over=take_over, model=model)
        await self._service.ask(update, self._service.until())
        try:
            await self._ask_engines(update)
        except ProrlError as error:
            if isinstance(error, NoBackend) or "backend" in error.fields:  # it is removed
                self._hold_no_more(model)
            elif not isinstance(error, RequestTimeout):  # it stays
                with suppress(ProrlError):
                    await self._service.ask(replace(update, request_id=new_id(), step="cancel"), self._service.until())
            raise
        self._hold_no_more(model)

    async def set_weight_version(
        self, weight_version: int, *, timeout_s: float | None = None, take_over: bool = False, model: str = POLICY
    ) -> None:
        """Declare that a model's backends serve this version from now on; for engines updated while they generated.

        Every token that they generate from now on carries the version, unless a server reports another one itself.

        Raises:
            UpdateInProgress: an update was begun; end or cancel it.
            RequestTimeout: the backend broker, or an engine host, did not answer; `backend` names it.
        """
        await self._serve_weights(
            self._weight_update("set", weight_version, timeout_s, take_over=take_over, model=model)
        )

    def _weight_update(
        self, step: UpdateStep, version: int, timeout_s: float | None, *, take_over: bool, model: str
    ) -> WeightUpdate:
        limit_s = min(max(0.001, self.timeout_s if timeout_s is None else timeout_s), MAX_UPDATE_S)
        return WeightUpdate(
            new_id(), step, version, timeout_s=limit_s, trainer=self.session, take_over=take_over, model=model
        )

    async def _serve_weights(self, update: WeightUpdate) -> Any:
        """Have all engines serve these weights, then have the batches drop rollouts that are too old for them."""
        served = await self._ask_engines(update)
        if update.model == POLICY:
            self.weight_version = update.weight_version
        await self._service.ask(update, self._service.until())
        return served

    async def _ask_engines(self, update: WeightUpdate) -> Any:
        """Send a step to a model's engines through the backend broker, while this client holds their weights."""
        place, model = await self._service.backend_broker_place(self._service.until()), update.model
        if is_first := model not in self._holding:
            renewal = partial(HoldWeights, trainer=self.session, model=model)
            holding = self._holding[model] = KeepAlive(*place, renewal, HOLD_S)
            weakref.finalize(self._service, holding.stop).atexit = False
        try:
            return await self.backends.ask(update, update.timeout_s + TAKE_BACK_S + REPLY_SLACK_S)
        except WeightsHeld:
            self._hold_no_more(model)
            raise
        except ProrlError:
            if is_first:
                with suppress(ProrlError):
                    await self._release_weights(model)
            raise

    async def _release_weights(self, model: str) -> None:
        """Release a model's weights to other trainers, if the service answers within a second."""
        if model in self._holding:
            self._hold_no_more(model)
            await self.backends.ask(HoldWeights(new_id(), self.session, goodbye=True, model=model), 1.0)

    def _hold_no_more(self, model: str) -> None:
        if (holding := self._holding.pop(model, None)) is not None:
            holding.close()


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())
