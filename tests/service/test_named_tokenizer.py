"""A job of the task `score` that names a tokenizer by itself."""

from __future__ import annotations

import numpy as np
from support.rescoring import teacher_policy

from prorl_zmq.client.score_jobs import score_job
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.testing import LocalService
from prorl_zmq.wire.messages.chat import ChatSettings


def test_a_tokenizer_of_no_backend_is_not_loaded() -> None:
    chat = ChatSettings(kind="transformers", tokenizer="someone/hostile")
    models = {"teacher": EmbeddedEngine(teacher_policy())}
    with LocalService(engine=EmbeddedEngine(base_policy()), models=models) as service, service.client() as client:
        client.submit(score_job(np.array([1, 2], np.int32), (), 1, chat, "teacher"))
        (ended,) = client.stream(timeout_s=60)
    assert ended.error is not None
    assert (ended.error.code, ended.error.fields["field"]) == ("invalid_job", "chat")
    assert "no backend of the service has the tokenizer 'someone/hostile'" in ended.error.message
