"""Errors in the statuses and words that harnesses were seen to react to."""

from __future__ import annotations

import json

import pytest

from prorl_zmq.model_proxy.calls import CallRefused, ModelRequest, Problem
from prorl_zmq.model_proxy.dialects.chat_completions import ChatCompletions
from prorl_zmq.model_proxy.dialects.gemini import Gemini
from prorl_zmq.model_proxy.dialects.messages import Messages
from prorl_zmq.model_proxy.dialects.responses import Responses

OPENAI = {
    Problem.INVALID: (400, "invalid_prompt"),
    Problem.TOO_LARGE: (413, "request_too_large"),
    Problem.CONTEXT_LENGTH: (400, "context_length_exceeded"),
    Problem.OVER: (403, "invalid_prompt"),
    Problem.BUSY: (429, "rate_limit_exceeded"),
    Problem.FAILED: (503, "server_error"),
    Problem.NOT_ALLOWED: (401, "invalid_api_key"),
    Problem.NOT_FOUND: (404, "not_found"),
    Problem.INTERNAL: (500, "server_error"),
}
ANTHROPIC = {
    Problem.INVALID: (400, "invalid_request_error"),
    Problem.TOO_LARGE: (413, "request_too_large"),
    Problem.CONTEXT_LENGTH: (400, "invalid_request_error"),
    Problem.OVER: (403, "permission_error"),
    Problem.BUSY: (429, "rate_limit_error"),
    Problem.FAILED: (529, "overloaded_error"),
    Problem.NOT_ALLOWED: (401, "authentication_error"),
    Problem.NOT_FOUND: (404, "not_found_error"),
    Problem.INTERNAL: (500, "api_error"),
}
GOOGLE = {
    Problem.INVALID: (400, "INVALID_ARGUMENT"),
    Problem.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    Problem.CONTEXT_LENGTH: (400, "INVALID_ARGUMENT"),
    Problem.OVER: (403, "PERMISSION_DENIED"),
    Problem.BUSY: (429, "RESOURCE_EXHAUSTED"),
    Problem.FAILED: (503, "UNAVAILABLE"),
    Problem.NOT_ALLOWED: (401, "UNAUTHENTICATED"),
    Problem.NOT_FOUND: (404, "NOT_FOUND"),
    Problem.INTERNAL: (500, "INTERNAL"),
}


@pytest.mark.parametrize("problem", Problem)
def test_each_api_has_a_status_and_a_word_for_each_problem(problem: Problem) -> None:
    error = CallRefused(problem, "words", tokens=300, limit=200)
    for dialect in (ChatCompletions(), Responses()):
        status, data = dialect.error(error, 403)
        assert (status, data["error"]["code"]) == OPENAI[problem]
    status, data = Messages().error(error, 403)
    assert (status, data["type"], data["error"]["type"]) == (ANTHROPIC[problem][0], "error", ANTHROPIC[problem][1])
    status, data = Gemini().error(error, 403)
    assert (status, data["error"]["code"], data["error"]["status"]) == (GOOGLE[problem][0], *GOOGLE[problem])


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_harnesses_look_for() -> None:
    error = CallRefused(Problem.CONTEXT_LENGTH, "words", tokens=300, limit=200)
    said = [json.dumps(dialect.error(error, 400)[1]) for dialect in (Messages(), ChatCompletions(), Gemini())]
    assert "prompt is too long: 300 tokens > 200 maximum" in said[0]
    assert "This model's maximum context length is 200 tokens. However, " in said[1]
    assert "input token count (300) exceeds the maximum number of tokens allowed (200)" in said[2]


def test_a_response_that_fails_early_is_a_response_all_the_same() -> None:
    stream = Responses().stream(ModelRequest(()), "policy")
    created, failed = (
        json.loads(event.split(b"data: ")[1])
        for event in stream.fail(CallRefused(Problem.OVER, "it is over"), 400).removesuffix(b"\n\n").split(b"\n\n")
    )
    assert created["type"] == "response.created"
    assert failed["type"] == "response.failed"
    assert failed["response"]["id"] == created["response"]["id"]
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": "it is over"}
