from __future__ import annotations

import numpy as np
import pytest

from prorl_zmq.inference.hosting.job_traffic import ACTIVE_S, BLOCK_TOKENS, CONVERSATION_LIMIT, JobTraffic


class Talk:
    """A conversation whose turns are noted."""

    def __init__(self, traffic: JobTraffic, job_id: str = "job", first: int = 0) -> None:
        self.traffic, self.job_id = traffic, job_id
        self.tokens = np.arange(first, first + 1_000, dtype=np.int32)

    def turn(self, cached: int | None = None, now: float = 0.0) -> int:
        """Return what was computed again. By default the engine finds all that it computed before."""
        prompt, generated = self.tokens, np.full(100, 7, np.int32)
        found = len(prompt) - 50 if cached is None else cached
        self.tokens = np.concatenate([prompt, generated, np.full(50, 9, np.int32)])
        return self.traffic.note_turn(self.job_id, prompt, generated, found, now)


@pytest.fixture
def traffic() -> JobTraffic:
    return JobTraffic()


def test_what_the_engine_had_and_lost_was_computed_again(traffic: JobTraffic) -> None:
    talk = Talk(traffic)
    assert talk.turn(cached=0) == 0, "never computed before"
    assert (traffic.prompt_tokens, traffic.again_tokens) == (1_000, 0)
    assert talk.turn() == 0
    assert (traffic.prompt_tokens, traffic.again_tokens) == (2_150, 0)
    assert talk.turn(cached=0) == traffic.again_tokens == 1_250, "the tools' answer is new"
    assert talk.turn(cached=1_000) == 400
    assert traffic.again_tokens == 1_250 + 400


def test_a_part_of_a_block_is_no_loss(traffic: JobTraffic) -> None:
    talk = Talk(traffic)
    talk.turn()
    talk.turn(cached=1_100 - BLOCK_TOKENS)
    assert traffic.again_tokens == 0


def test_conversations_of_one_job_are_told_apart(traffic: JobTraffic) -> None:
    main, agent = Talk(traffic), Talk(traffic, first=5)
    for now in (0.0, 1.0):
        main.turn(now=now)
        agent.turn(cached=None if now else 0, now=now)
    assert traffic.again_tokens == 0
    main.turn(cached=0, now=2.0)
    assert traffic.again_tokens == 1_250
    assert traffic.contexts(2.0) == [1_400 + 1_250]
    main.turn(now=ACTIVE_S)
    assert traffic.contexts(ACTIVE_S + 1.0) == [1_550], "the sub-agent has ended"
    assert traffic.contexts(9 * ACTIVE_S) == [1_550], "a job that waits for a tool keeps its context"


def test_a_rewritten_context_is_a_new_conversation(traffic: JobTraffic) -> None:
    talk = Talk(traffic)
    talk.turn()
    talk.tokens = talk.tokens.copy()
    talk.tokens[0] = 12_345
    talk.turn(cached=0)
    assert traffic.again_tokens == 0


def test_new_weights_empty_the_cache_without_a_loss(traffic: JobTraffic) -> None:
    talk = Talk(traffic)
    talk.turn()
    traffic.note_weights()
    talk.turn(cached=0)
    assert traffic.again_tokens == 0
    assert traffic.contexts(0.0) == [1_250]
    talk.turn(cached=0)
    assert traffic.again_tokens == 1_250


def test_jobs_that_have_ended_are_forgotten(traffic: JobTraffic) -> None:
    for number in range(5):
        Talk(traffic, f"job-{number}").turn(now=float(number))
    Talk(traffic, "job-0").turn(now=9.0)
    traffic.keep_latest(2)
    assert list(traffic._jobs) == ["job-4", "job-0"]
    traffic.keep_latest(0)
    assert traffic.contexts(9.0) == []


def test_few_conversations_are_remembered(traffic: JobTraffic) -> None:
    for number in range(3 * CONVERSATION_LIMIT):
        Talk(traffic, first=10_000 * number).turn()
    assert len(traffic._jobs["job"].conversations) == CONVERSATION_LIMIT
