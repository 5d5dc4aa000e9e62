"""Routes of a real vLLM on a CPU, for tests: a worker extension that notes what its routers choose.

vLLM gives routes only with its Model Runner V2, which needs a GPU. `RoutedVllmEngine` has the same answers: its
extension (`--worker-extension-cls vllm_routes.Routes`) keeps each row under a hash of the weight version and of all
tokens up to the row's own, so cached prefixes, prompts in parts and recomputed requests need no special case.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prorl_zmq.inference.engine import NOTHING_MORE, Generation, Wanted
from prorl_zmq.inference.records import narrow_experts, rows_wanted
from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
from prorl_zmq.wire.records import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling

FLAGS = ("--worker-extension-cls=vllm_routes.Routes", "--enforce-eager")


class Routes:
    """The methods of vLLM's workers that `collective_rpc` calls."""

    model_runner: Any

    def note_routes(self) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._rows: dict[bytes, bytes] = {}
        self._counts = {"noted": 0, "again": 0, "different": 0}
        self._version = 0
        self._step: dict[int, Any] = {}
        runner = self.model_runner
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(
                    lambda chosen, layer=module.layer_id: self._step.__setitem__(layer, chosen.numpy().copy())
                )
        forward = runner._model_forward

        def noting(*given: Any, **named: Any) -> Any:
            self._step = {}
            output = forward(*given, **named)
            self._note_step()
            return output

        runner._model_forward = noting

    def begin_routes(self, weight_version: int) -> None:
        self._version = weight_version

    def routes_of(self, tokens: list[int], start: int, versions: list[int]) -> tuple[bytes, list[int]]:
        """Give the rows from `start` on, until one is missing, as int32 bytes with their shape."""
        ids = np.array(tokens, np.int32)
        rows = []
        for position, version in enumerate(versions, start):
            row = self._rows.get(_key(version, ids[: position + 1]))
            if row is None:
                break
            rows.append(row)
        shape = [len(rows), self.model_runner.model_config.hf_text_config.num_hidden_layers, -1]
        return b"".join(rows), shape

    def routes_counted(self) -> dict[str, int]:
        return self._counts

    def _note_step(self) -> None:
        batch = self.model_runner.input_batch
        starts = self.model_runner.query_start_loc.np
        if not self._step or not batch.num_reqs:
            return  # a trial run
        chosen = np.stack([self._step[layer] for layer in sorted(self._step)], axis=1).astype(np.int32)
        for number in range(batch.num_reqs):
            done = int(batch.num_computed_tokens_cpu[number])
            for offset, row in enumerate(chosen[starts[number] : starts[number + 1]]):
                tokens = batch.token_ids_cpu[number, : done + offset + 1]
                self._keep(_key(self._version, tokens), row.tobytes())

    def _keep(self, key: bytes, row: bytes) -> None:
        self._counts["noted"] += 1
        if key in self._rows:
            self._counts["again"] += 1
            self._counts["different"] += self._rows[key] != row
        self._rows.setdefault(key, row)


def _key(version: int, tokens: NDArray[Any]) -> bytes:
    return hashlib.blake2b(tokens.astype(np.int32).tobytes(), salt=version.to_bytes(16, "little")).digest()


class RoutedVllmEngine(VllmEngine):
    """A `VllmEngine` that gives experts on a CPU, and takes new weights without them; start it with `FLAGS`."""

    refusal: str
    """Why the engine itself would take none."""

    @classmethod
    async def start(cls, *given: Any, **named: Any) -> RoutedVllmEngine:
        engine = await super().start(*given, **named)
        assert isinstance(engine, cls)
        engine._description = replace(engine._description, records=(*engine._description.records, EXPERTS))
        await engine._llm.collective_rpc("note_routes")
        engine.refusal, engine._no_updates = engine._no_updates, ""  # on a CPU all but the experts are loaded
        return engine

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        plain = Wanted(tuple(form for form in wanted.record if form != EXPERTS), wanted.rows_known)
        done = await super().generate(token_ids, sampling, stop_token_ids, job_id, plain)
        if EXPERTS not in wanted.record or not len(done.token_ids):
            return done
        tokens = [*token_ids.tolist(), *done.token_ids.tolist()]
        made_by = [span.weight_version for span in done.spans for _ in range(span.start, span.end)]
        # Row i is of the forward pass that predicts token i + 1.
        versions = [made_by[max(row + 1 - len(token_ids), 0)] for row in range(len(tokens) - 1)]
        asked = (tokens, wanted.rows_known, versions[wanted.rows_known :])
        data, shape = (await self._llm.collective_rpc("routes_of", args=asked))[0]
        experts = self._llm.vllm_config.model_config.hf_text_config.num_experts
        routes = narrow_experts(np.frombuffer(data, np.int32).reshape(shape), experts)
        return replace(done, records={**done.records, **rows_wanted(routes, wanted.rows_known, wanted.rows_known)})

    async def counts(self) -> dict[str, int]:
        return (await self._llm.collective_rpc("routes_counted"))[0]

    async def _load(self, path: Path, weight_version: int) -> None:
        await super()._load(path, weight_version)
        await self._llm.collective_rpc("begin_routes", args=(weight_version,))
