"""A job's arguments of the chat template reach it, and one that it does not take is the job's error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .conftest import in_process, scripted
from .endless_engine import EndlessEngine

if TYPE_CHECKING:
    from pathlib import Path


def test_an_argument_that_the_template_does_not_take(tmp_path: Path) -> None:
    job = msgspec.structs.replace(scripted(run="converse"), template_arguments={"enable_thinking": False})
    with in_process(engine=EndlessEngine(tmp_path / "mark")) as service, service.client() as client:
        client.submit([job])
        (rollout,) = client.stream(timeout_s=60)
    error = rollout.result.error
    assert error is not None
    assert (error.code, error.fields["field"]) == ("invalid_job", "template_arguments")
    assert "takes no template arguments" in error.message
