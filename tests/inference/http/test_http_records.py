"""Records of HTTP servers: what is asked for, what is read, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import Wanted
from prorl_zmq.inference.http.dialects import Turn
from prorl_zmq.inference.http.generate_dialects import Prorl, Sglang
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.inference.http.record_fields import MixtureShape
from prorl_zmq.inference.http.vllm_dialects import Completions, VllmGenerate
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.records import Recorded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROMPT = np.array([1, 2, 3], np.int32)
NARROW = Sampling(max_tokens=2, top_k=5)
ALL = ("top_logprobs:2", "sampling_mask", "experts")
TURN = Turn(PROMPT, NARROW, (), Recorded.parse(ALL), rows_known=1)
SHAPE = MixtureShape(layers=2, chosen=2, experts=16)
ROUTES = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
"""Of the tokens 1, 2, 3 and 4, where 4 and 5 are generated."""
IDS = [4, 5]
MASK = [[4, 7], [5]]
TOP = {"top_ids": [[4, 9], [8, 5]], "top_logprobs": [[-0.5, -1.0], [-0.25, -0.5]]}


def npy(array: np.ndarray[Any, Any]) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def candidates(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": value, "rank": 1} for token, value in pairs]


def vllm_answer(**more: Any) -> Any:
    """An answer whose candidates begin with the drawn token, as vLLM's do."""
    content = [
        {"token_id": 4, "logprob": -0.5, "top_logprobs": candidates((4, -0.5), (9, -1.0), (7, -2.0))},
        {"token_id": 5, "logprob": -0.5, "top_logprobs": candidates((5, -0.5), (8, -0.25), (9, -0.75))},
    ]
    choice = {"token_ids": IDS, "logprobs": {"content": content}, "finish_reason": "length", "sampling_mask": MASK}
    return {"choices": [{**choice, "routed_experts": npy(ROUTES[1:]), **more}]}


def completions_answer(**more: Any) -> Any:
    top = [{"token_id:4": -0.5, "token_id:9": -1.0, "token_id:7": -2.0}, {"token_id:5": -0.5, "token_id:8": -0.25}]
    logprobs = {"token_logprobs": [-0.5, -0.5], "top_logprobs": top}
    choice = {"text": "x", "token_ids": IDS, "logprobs": logprobs, "finish_reason": "length"}
    return {"choices": [{**choice, "routed_experts": npy(ROUTES[1:]), **more}]}


def sglang_answer(**more: Any) -> Any:
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 4, None], [-0.5, 5, None]],
        "output_top_logprobs": [[[-0.5, 4, None], [-1.0, 9, None]], [[-0.25, 8, None], [-0.5, 5, None]]],
        "output_token_sampling_mask": MASK,
        "routed_experts": base64.b64encode(ROUTES[1:].astype(np.int32).tobytes()).decode(),
    }
    return {"output_ids": IDS, "meta_info": {**meta, **more}}


def read(dialect: Any, answer: Any, turn: Turn = TURN) -> dict[str, Any]:
    return {
        name: array.tolist() for name, array in dialect.generation(json.dumps(answer).encode(), turn).records.items()
    }


def test_each_server_is_asked_under_its_own_names() -> None:
    vllm = json.loads(VllmGenerate().request(TURN))["sampling_params"]
    assert (vllm["logprobs"], vllm["routed_experts_prompt_start"]) == (3, 1)
    completions = json.loads(Completions("m").request(TURN))
    assert (completions["logprobs"], completions["routed_experts_prompt_start"]) == (2, 1)
    sglang = json.loads(Sglang().request(TURN))
    names = ("top_logprobs_num", "return_sampling_mask", "return_routed_experts", "routed_experts_start_len")
    assert [sglang[name] for name in names] == [2, True, True, 1]
    plain = Turn(PROMPT, NARROW, ())
    for dialect in (VllmGenerate(), Completions(), Sglang(), Prorl()):
        assert not {*names, "routed_experts_prompt_start"} & {*json.loads(dialect.request(plain))}


def test_each_servers_records_are_read() -> None:
    expected = {**TOP, "mask_ids": [4, 7, 5], "mask_counts": [2, 1], "experts": ROUTES[1:].tolist()}
    assert read(VllmGenerate(), vllm_answer()) == expected
    assert read(Sglang(SHAPE), sglang_answer()) == expected
    del expected["mask_ids"], expected["mask_counts"]
    assert read(Completions(), completions_answer()) == expected
    assert read(VllmGenerate(), vllm_answer(), Turn(PROMPT, NARROW, ())) == {}


def test_a_missing_record_is_left_out_and_never_zeros() -> None:
    assert {*read(VllmGenerate(), vllm_answer(routed_experts=None, sampling_mask=None))} == {*TOP}
    assert {*read(Sglang(SHAPE), sglang_answer(routed_experts=None, output_token_sampling_mask=None))} == {*TOP}
    assert {*read(Sglang(), sglang_answer())} == {*TOP, "mask_ids", "mask_counts"}, "its model's layers are not known"


def test_all_rows_of_an_older_sglang_are_cut_to_the_new_ones() -> None:
    whole = base64.b64encode(ROUTES.astype(np.int32).tobytes()).decode()
    assert read(Sglang(SHAPE), sglang_answer(routed_experts=whole))["experts"] == ROUTES[1:].tolist()


@pytest.mark.parametrize(
    ("dialect", "answer", "problem"),
    [
        (VllmGenerate(), vllm_answer(routed_experts="?"), "no .npy file in base64"),
        (VllmGenerate(), vllm_answer(routed_experts=npy(ROUTES)[:40]), "no .npy file in base64"),
        (VllmGenerate(), vllm_answer(routed_experts=npy(ROUTES[0])), "not integers of shape"),
        (VllmGenerate(), vllm_answer(routed_experts=npy(ROUTES.astype(np.int32) - 1)), "outside of 0 to 65535"),
        (VllmGenerate(), vllm_answer(sampling_mask=[[4, 2**40], [5]]), "which no vocabulary holds"),
        (Sglang(SHAPE), sglang_answer(routed_experts="AAAA"), "not rows of 2 layers"),
        (Sglang(MixtureShape(2, 2, 8)), sglang_answer(), "outside of 0 to 7"),
        (Sglang(SHAPE), sglang_answer(output_top_logprobs=None), "0 output_top_logprobs with 2 tokens"),
        (Sglang(SHAPE), sglang_answer(output_top_logprobs=[[[-0.5, 4, None]]] * 2), "1 of the 2 likeliest"),
        (Completions(), completions_answer(logprobs={"token_logprobs": [-1, -1]}), "0 top_logprobs with 2"),
    ],
)
def test_a_wrong_record_fails_the_turn(dialect: Any, answer: Any, problem: str) -> None:
    with pytest.raises(EngineFailed, match=problem):
        read(dialect, answer)


@asynccontextmanager
async def engine_of(server: Any) -> AsyncIterator[HttpEngine]:
    chat = ChatSettings("transformers", "tokenizer")
    engine = await HttpEngine.start(server.url, chat=chat, retry_s=0.3, start_s=5.0)
    try:
        yield engine
    finally:
        await engine.close()


def test_a_server_offers_what_its_first_answer_has(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/inference/v1/generate"] = lambda _: web.json_response(vllm_answer())
            async with engine_of(server) as engine:
                assert engine.description.records == ("top_logprobs", "sampling_mask", "experts")
                done = await engine.generate(PROMPT, NARROW, (), "job", Wanted(ALL, 1))
                assert done.records["experts"].tolist() == ROUTES[1:].tolist()
            plain = vllm_answer(routed_experts=None, sampling_mask=None)
            server.handlers["/inference/v1/generate"] = lambda _: web.json_response(plain)
            async with engine_of(server) as engine:
                assert engine.description.records == ("top_logprobs",)
                with pytest.raises(EngineFailed, match="does not give the records sampling_mask, experts") as caught:
                    await engine.generate(PROMPT, NARROW, (), "job", Wanted(ALL))
                assert caught.value.fields["refused"]

    asyncio.run(main())


def test_a_mask_without_its_token_fails_the_turn(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/inference/v1/generate"] = lambda _: web.json_response(vllm_answer())
            async with engine_of(server) as engine:
                wrong = vllm_answer(sampling_mask=[[5], [4]])
                server.handlers["/inference/v1/generate"] = lambda _: web.json_response(wrong)
                with pytest.raises(EngineFailed, match="missing in its sampling mask"):
                    await engine.generate(PROMPT, NARROW, (), "job", Wanted(ALL, 1))

    asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 2, 21, 1025])
def test_a_servers_limit_of_top_logprobs_is_found_at_the_start(serving: Any, limit: int) -> None:
    """The token API counts the drawn token as one of them."""

    def answer(body: Any) -> web.Response:
        count = body["sampling_params"]["logprobs"]
        if count > limit:
            return web.json_response({"error": {"message": f"{count} log-probs are over {limit}"}}, status=400)
        ranked = [(4, -0.5), *((id_, -1.0) for id_ in range(5, 3 + max(count, 1)))]
        content = [{"token_id": 4, "logprob": -0.5, "top_logprobs": candidates(*ranked)}]
        choice = {"token_ids": [4], "logprobs": {"content": content}, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    async def main() -> None:
        async with serving() as server:
            server.handlers["/inference/v1/generate"] = answer
            async with engine_of(server) as engine:
                most = limit - 1
                assert engine.description.records == (("top_logprobs",) if most else ())
                sampling = Sampling(max_tokens=1)
                if most:
                    done = await engine.generate(PROMPT, sampling, (), "job", Wanted((f"top_logprobs:{most}",)))
                    assert done.records["top_ids"].shape == (1, most)
                if 1 <= most < 1024:
                    said = f"gives at most top_logprobs:{most}"
                    with pytest.raises(EngineFailed, match=said) as caught:
                        await engine.generate(PROMPT, sampling, (), "job", Wanted((f"top_logprobs:{most + 1}",)))
                    assert caught.value.fields["refused"]

    asyncio.run(main())


def test_sglangs_routes_need_the_models_shape(serving: Any, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 16, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))

    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.json_response(sglang_answer())
            server.handlers["/get_model_info"] = lambda _: web.json_response({"model_path": str(tmp_path)})
            for enabled in (True, False):
                said = {"enable_return_routed_experts": enabled}
                server.handlers["/get_server_info"] = lambda _, said=said: web.json_response(said)
                async with engine_of(server) as engine:
                    experts = ("experts",) if enabled else ()
                    assert engine.description.records == ("top_logprobs", "sampling_mask", *experts)
            wanted = Turn(PROMPT, NARROW, (), Recorded(mask=True))
            assert wanted.answer_limit_bytes == 2**28

    asyncio.run(main())


def test_the_parts_of_a_turn_that_new_weights_cut_have_their_records_joined(serving: Any) -> None:
    def part(body: Any) -> Any:
        """Routes of token n are all n; the first part aborts after two tokens."""
        ids = body["token_ids"]
        count = 2 if len(ids) == 3 else body["sampling_params"]["max_tokens"]
        made = [ids[-1] + 1 + n for n in range(count)]
        tokens, start = [*ids, *made], body["sampling_params"].get("routed_experts_prompt_start", 0)
        rows = np.array([np.full((2, 2), token) for token in tokens[start:-1]], np.uint8)
        content = [{"token_id": i, "logprob": -0.5, "top_logprobs": candidates((i, -0.5), (0, -1.0))} for i in made]
        reason = "abort" if len(ids) == 3 and body["sampling_params"]["max_tokens"] == 6 else "length"
        choice = {"token_ids": made, "logprobs": {"content": content}, "finish_reason": reason}
        return {**choice, "sampling_mask": [[i] for i in made], "routed_experts": npy(rows)}

    async def main() -> None:
        async with serving() as server:
            asked = asyncio.Event()
            paused = asyncio.Event()

            async def generate(body: Any) -> web.Response:
                answer = part(body)
                if answer["finish_reason"] == "abort":
                    asked.set()
                    await paused.wait()
                return web.json_response({"choices": [answer]})

            server.handlers["/inference/v1/generate"] = generate
            async with engine_of(server) as engine:
                sampling = Sampling(max_tokens=6, top_k=3)
                task = asyncio.create_task(
                    engine.generate(PROMPT, sampling, (), "job", Wanted(("top_logprobs:1", "sampling_mask", "experts")))
                )
                await asked.wait()
                engine._pause._keeping = True  # as in an update of mode `keep`
                engine._updates_begun += 1
                paused.set()
                done = await task
                assert done.token_ids.tolist() == [4, 5, 6, 7, 8, 9]
                assert done.records["experts"][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
                assert done.records["mask_ids"].tolist() == done.token_ids.tolist()
                assert done.records["top_ids"].shape == (6, 1)

    asyncio.run(main())
