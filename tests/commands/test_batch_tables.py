"""Batches as `prorl status` lists them."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console, RenderableType

from prorl_zmq.commands.status import batch_table
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.batches import BatchStatus


def printed(shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def test_a_session_that_people_named_is_listed_whole_and_a_random_one_short() -> None:
    random = new_id()
    batches = tuple(
        BatchStatus(
            batch_id=f"batch-{number}",
            session=session,
            state="open",
            target_groups=4,
            group_size=2,
            kept=1,
            under_way=1,
            in_flight=2,
            prompts=0,
        )
        for number, session in enumerate(("grpo-qwen3-8b-second-try", random))
    )
    shown = printed(batch_table(batches))
    assert " grpo-qwen3-8b-second-try " in shown
    assert f" {random[:12]} " in shown
    assert random not in shown


def test_the_models_of_batches_are_listed_if_one_is_not_the_policys() -> None:
    one = BatchStatus(
        batch_id="batch",
        session="s",
        state="open",
        target_groups=4,
        group_size=2,
        kept=1,
        under_way=1,
        in_flight=2,
        prompts=0,
    )
    assert "model" not in printed(batch_table((one,)))
    shown = printed(batch_table((one, replace(one, model="critic"))))
    assert "policy" in shown
    assert "critic" in shown
