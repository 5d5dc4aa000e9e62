from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import checked
from prorl_zmq.inference.http.answers import LOADING, UNTOLD, version_number, with_version
from prorl_zmq.inference.http.dialects import Turn
from prorl_zmq.inference.http.generate_dialects import Prorl, Sglang
from prorl_zmq.inference.http.vllm_dialects import Completions, VllmGenerate
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.inference.http.dialects import Dialect

DIALECTS = {"vllm": VllmGenerate(), "completions": Completions("tiny"), "sglang": Sglang(), "prorl": Prorl()}
PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=4, stop=("END",), seed=2**62)
NOTHING_MORE = Turn(PROMPT, Sampling(max_tokens=4), (7, 9))
FULL = Turn(PROMPT, SAMPLING, (7, 9))


def body(dialect: Dialect, turn: Turn) -> Any:
    return json.loads(dialect.request(turn))


def read(name: str, answer: Any, turn: Turn = NOTHING_MORE) -> Generation:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    generation = DIALECTS[name].generation(data, turn)
    return checked(replace(generation, spans=with_version(generation.spans, 6)), 4, vocabulary=100)


def test_vllm_is_asked_by_ids_under_its_own_names() -> None:
    asked = body(DIALECTS["vllm"], FULL)
    assert asked["token_ids"] == [1, 2, 3]
    expected = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logprobs": 0}
    assert asked["sampling_params"] == expected | {
        "stop_token_ids": [7, 9],
        "detokenize": True,
        "ignore_eos": True,
        "stop": ["END"],
        "seed": 2**62,
    }
    plain = body(DIALECTS["vllm"], NOTHING_MORE)["sampling_params"]
    assert plain["detokenize"] is False
    assert plain["top_k"] == -1
    assert "seed" not in plain
    assert "stop" not in plain


def test_completions_leaves_nothing_to_the_servers_defaults() -> None:
    asked = body(DIALECTS["completions"], NOTHING_MORE)
    assert asked == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": [7, 9],
    }


def test_sglang_is_asked_for_log_probs_of_the_answer_only() -> None:
    asked = body(DIALECTS["sglang"], FULL)
    assert asked["input_ids"] == [1, 2, 3]
    assert asked["return_logprob"] is True
    assert asked["logprob_start_len"] == -1
    parameters = asked["sampling_params"]
    assert (parameters["max_new_tokens"], parameters["sampling_seed"], parameters["stop"]) == (4, 2**62, ["END"])


def test_prorl_servers_take_the_parameters_beside_the_prompt() -> None:
    asked = body(DIALECTS["prorl"], FULL)
    assert "sampling_params" not in asked
    assert (asked["prompt_ids"], asked["max_tokens"], asked["top_k"], asked["seed"]) == ([1, 2, 3], 4, 5, 2**62)


def test_an_answer_becomes_a_generation(speech: Any) -> None:
    generation = read(speech.name, speech.answer([4, 5, 7], [-1.0, 0, -2.5], "stop", "12"))
    assert generation.token_ids.tolist() == [4, 5, 7]
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.tolist() == [-1.0, 0.0, -2.5]
    assert generation.logprobs.dtype == np.float32
    assert generation.finish_reason == "stop"
    said = speech.name in ("vllm", "sglang")
    assert generation.spans == (VersionSpan(12 if said else 6, 0, 3),)
    assert generation.cached_tokens == (2 if speech.name in ("completions", "sglang") else 0)


@pytest.mark.parametrize(
    ("ids", "logprobs", "words"),
    [
        ([4, 5, 6], [-1.0, -1.0], "log-probs"),
        ([4, 5], [-1.0, -1.0, -1.0], "log-probs"),
        ([4, 5], [-1.0, None], "not a logarithm"),
        ([4, 5], [-1.0, 0.7], "not a logarithm"),
        ([4, 100], [-1.0, -1.0], "beyond its vocabulary of 100"),
        ([4, -1], [-1.0, -1.0], "negative token id"),
        ([4, 2**40], [-1.0, -1.0], "no vocabulary holds"),
        ([4, 5, 6, 7, 8], [-1.0] * 5, "at most 4"),
        ([], [], "without a token"),
    ],
)
def test_what_cannot_be_is_refused(speech: Any, ids: list[int], logprobs: list[float | None], words: str) -> None:
    answer = speech.answer(ids, logprobs)
    if speech.name == "sglang" and len(ids) < len(logprobs):
        answer["meta_info"]["output_token_logprobs"].append([-1.0, 9, None])
    with pytest.raises(EngineFailed, match=words):
        read(speech.name, answer)


def test_text_only_is_refused(speech: Any) -> None:
    with pytest.raises(EngineFailed, match="text only"):
        read(speech.name, speech.text_only())


@pytest.mark.parametrize("data", [b"", b"<html>", b'{"choices": [', b'{"meta_info": {"cached', b"\xff\xfe"])
def test_what_is_not_json_is_refused(speech: Any, data: bytes) -> None:
    with pytest.raises(EngineFailed, match="not JSON"):
        read(speech.name, data)


def test_a_literal_nan_is_refused(speech: Any) -> None:
    data = json.dumps(speech.answer([4, 5], [-1.0, float("nan")])).encode()
    assert b"NaN" in data
    with pytest.raises(EngineFailed, match="not JSON"):
        read(speech.name, data)


def test_json_of_another_form_is_refused(speech: Any) -> None:
    for answer in ([], {"choices": 3, "meta_info": 3, "response_ids": 3}, {"choices": [], "meta_info": {}}):
        with pytest.raises(EngineFailed):
            read(speech.name, answer)


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_vllm_writes_minus_9999_for_nan(speeches: Any, name: str) -> None:
    with pytest.raises(EngineFailed, match="not a logarithm"):
        read(name, speeches[name].answer([4, 5], [-1.0, -9999.0]))


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang"])
def test_an_unknown_end_is_refused(speeches: Any, name: str) -> None:
    with pytest.raises(EngineFailed, match="'repetition'"):
        read(name, speeches[name].answer([4], [-1.0], "repetition"))


@pytest.mark.parametrize("name", ["vllm", "completions", "sglang"])
def test_an_aborted_turn_may_be_empty(speeches: Any, name: str) -> None:
    generation = read(name, speeches[name].answer([], [], "abort"))
    assert (len(generation.token_ids), generation.finish_reason, generation.spans) == (0, "abort", ())


def test_vllm_says_which_weights_made_which_tokens(speeches: Any) -> None:
    answer = speeches["vllm"].answer([4, 5, 6], [-1.0] * 3)
    choice = answer["choices"][0]
    versions = [("default", 0, 0), ("default", 0, 1), ("3", 1, 3)]
    choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in versions]
    assert read("vllm", answer).spans == (VersionSpan(6, 0, 1), VersionSpan(3, 1, 3))
    choice["weight_versions"] = [{"version": "3", "start": 1, "end": 3}]
    with pytest.raises(EngineFailed, match="do not match"):
        read("vllm", answer)
    choice["weight_versions"] = None
    assert read("vllm", answer).spans == (VersionSpan(6, 0, 3),)


def test_log_probs_of_other_tokens_are_refused(speeches: Any) -> None:
    answer = speeches["vllm"].answer([4, 5], [-1.0, -1.0])
    answer["choices"][0]["logprobs"]["content"][1]["token_id"] = 6
    with pytest.raises(EngineFailed, match="other tokens"):
        read("vllm", answer)
    answer = speeches["sglang"].answer([4, 5], [-1.0, -1.0])
    answer["output_ids"] = [4, 6]
    with pytest.raises(EngineFailed, match="other tokens"):
        read("sglang", answer)


def test_older_vllm_gives_ids_in_place_of_texts() -> None:
    logprobs = {"token_logprobs": [-1.0, -2.0], "tokens": ["token_id:44", "token_id:5"]}
    answer = {"choices": [{"text": "x", "logprobs": logprobs, "finish_reason": "stop"}]}
    assert read("completions", answer).token_ids.tolist() == [44, 5]
    for tokens in (["a", "b"], ["token_id:4", "b"], ["token_id:x", "token_id:5"], []):
        logprobs["tokens"] = tokens
        with pytest.raises(EngineFailed, match="text only"):
            read("completions", answer)


@pytest.mark.parametrize(
    ("ids", "context", "reason"),
    [
        ([4, 7], 0, "stop"),
        ([4, 5, 6, 7], 0, "stop"),
        ([4, 5, 6, 8], 0, "length"),
        ([4, 5], 5, "length"),
        ([4], 5, "stop"),
    ],
)
def test_the_end_of_a_prorl_turn_is_inferred(ids: list[int], context: int, reason: str) -> None:
    data = json.dumps({"response_ids": ids, "logprobs": [-1.0] * len(ids)}).encode()
    assert Prorl(context).generation(data, NOTHING_MORE).finish_reason == reason


def test_log_probs_are_needed(speeches: Any) -> None:
    with pytest.raises(EngineFailed, match="no log-probs"):
        read("prorl", {"response_ids": [4], "logprobs": None})
    for name in ("vllm", "completions"):
        answer = speeches[name].answer([4], [-1.0])
        answer["choices"][0]["logprobs"] = None
        with pytest.raises(EngineFailed, match="no log-probs"):
            read(name, answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("41", 41),
        ("2147483647", 2**31 - 1),
        ("2147483648", UNTOLD),
        ("9" * 5000, UNTOLD),
        ("٣", UNTOLD),
        ("default", UNTOLD),
        ("step-3", UNTOLD),
        ("", UNTOLD),
        ("-3", UNTOLD),
        ("prorl-loading", LOADING),
    ],
)
def test_only_numbers_of_ours_are_versions(text: str, number: int) -> None:
    assert version_number(text) == number


def test_token_ids_of_thousands_of_digits_are_none() -> None:
    for token in ("token_id:" + "9" * 5000, "token_id:٣"):
        choice = {"logprobs": {"token_logprobs": [-1.0], "tokens": [token]}, "finish_reason": "stop"}
        with pytest.raises(EngineFailed, match="text only"):
            read("completions", {"choices": [choice]})


@pytest.mark.parametrize("start", [b'{"x":', b'{"choices":'])
def test_json_nested_too_deep_is_refused(speech: Any, start: bytes) -> None:
    with pytest.raises(EngineFailed):
        read(speech.name, start + b"[" * 10**6)


@pytest.mark.parametrize(("said", "kept"), [(-1, 0), (2**63, 3), (4, 3), (3, 3)])
def test_no_more_is_cached_than_the_prompt(speeches: Any, said: int, kept: int) -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": said}}
    for name in ("vllm", "completions"):
        assert read(name, {**speeches[name].answer([4], [-1.0]), "usage": usage}).cached_tokens == kept
    answer = speeches["sglang"].answer([4], [-1.0])
    answer["meta_info"]["cached_tokens"] = said
    assert read("sglang", answer).cached_tokens == kept


def test_longer_answers_are_taken_to_longer_questions() -> None:
    short = NOTHING_MORE.answer_limit_bytes
    assert 2**20 < short < 2**21
    assert Turn(PROMPT, Sampling(max_tokens=1000), ()).answer_limit_bytes > short + 996 * 500
    assert Turn(PROMPT, Sampling(max_tokens=2**30), ()).answer_limit_bytes == 2**28
