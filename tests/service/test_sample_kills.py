"""Replies at the gateway while a stage process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
from support.later import Later
from support.ports import free_port
from support.services import PROCESS, serving

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

REPLIES = 200


@pytest.mark.xdist_group("SDKs of models")
def test_a_killed_run_process_costs_no_reply() -> None:
    gateway = f"127.0.0.1:{free_port()}"
    topology = f'{PROCESS}[gateway]\nbind = "{gateway}"\nuse_llm_servers = false\n'

    with serving(topology) as service:

        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=f"http://{gateway}/v1", api_key="-", max_retries=4) as gpt:
                many = [
                    asyncio.create_task(gpt.completions.create(model="policy", prompt=f"{number}", max_tokens=40))
                    for number in range(REPLIES)
                ]
                done, _ = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
                assert len(done) < REPLIES
                os.kill(service.child("stage_run.json"), signal.SIGKILL)
                replies = await asyncio.gather(*many)
            assert all(reply.usage is not None and reply.usage.completion_tokens for reply in replies)
            assert len({reply.id for reply in replies}) == REPLIES

        asyncio.run(main())
