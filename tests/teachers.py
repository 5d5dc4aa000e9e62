"""Teachers for tests: policies other than the one that rolls out, and engines of them that cannot score all texts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from support.rescoring import exact_logprobs, teacher_policy

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from prorl_zmq import Trajectory
    from prorl_zmq.data.scores import Scores
    from prorl_zmq.inference.policy import Policy

CLOSE = 1e-4
TOP = 8
SHORT_CONTEXT = 24


def check_scores(scores: Scores, trajectory: Trajectory, policy: Policy, top: int = TOP) -> None:
    """Check each segment's scores against a rescoring in float64."""
    assert len(scores.logprobs) == len(trajectory.token_ids)
    edges = [0, *trajectory.result.segments, len(trajectory.token_ids)]
    for start, end in pairwise(edges):
        token_ids = trajectory.token_ids[start:end]
        expected = exact_logprobs(policy, token_ids)
        own = np.take_along_axis(expected, token_ids[1:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(scores.logprobs[start + 1 : end], own, atol=CLOSE, rtol=1e-6)
        likeliest = -np.sort(-expected, 1)[:, :top]
        np.testing.assert_allclose(scores.top_logprobs[start + 1 : end], likeliest, atol=CLOSE, rtol=1e-6)
        named = np.take_along_axis(expected, scores.top_ids[start + 1 : end].astype(np.int64), 1)
        np.testing.assert_allclose(named, likeliest, atol=CLOSE, rtol=1e-6)
        assert scores.logprobs[start] == 0
        assert np.all(scores.top_ids[start] == -1)


def without_context() -> EmbeddedEngine:
    engine = EmbeddedEngine(teacher_policy())
    engine._description = replace(engine.description, context_tokens=SHORT_CONTEXT)
    return engine


def of_other_words() -> EmbeddedEngine:
    engine = EmbeddedEngine(teacher_policy())
    engine._description = replace(engine.description, chat=ChatSettings("transformers", "/models/another"))
    return engine


class Moody(EmbeddedEngine):
    """Fails at its first texts."""

    def __init__(self, failures: int = 2) -> None:
        super().__init__(teacher_policy())
        self.failures = failures

    async def score(self, token_ids: Any, top: int, job_id: str) -> Scores:
        if self.failures:
            self.failures -= 1
            raise EngineFailed("not now")
        return await super().score(token_ids, top, job_id)
