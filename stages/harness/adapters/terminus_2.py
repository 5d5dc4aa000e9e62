"""Terminus 2, the agent of Harbor, over chat completions, not streamed. It types into a tmux in the sandbox.

Harbor runs it outside of the container that it works in. Here it runs inside, and a small class runs its commands in
the same sandbox: so the sandbox needs Python, but no network.
"""

from __future__ import annotations

import json

from ..adapter import Adapter, Launch, LaunchRequest, PyPI, ScriptedTurn

START = """\
import asyncio, os, shutil, sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.trial.paths import EnvironmentPaths

home = Path(os.environ["HOME"])
EnvironmentPaths.agent_dir = PurePosixPath(home)

class Here:
    default_user, session_id, trial_paths = None, "here", SimpleNamespace(agent_dir=home)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        pipe = asyncio.subprocess.PIPE
        run = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=cwd,
            env={**os.environ, **(env or {})},
        )
        try:
            out, err = await asyncio.wait_for(run.communicate(), timeout_sec)
        except TimeoutError:
            run.kill()
            raise
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=run.returncode)

    async def is_dir(self, path, user=None):
        return os.path.isdir(path)

async def main():
    if shutil.which("tmux") is None:
        sys.exit("terminus-2 types into a tmux, and there is none in this sandbox: use an image that has it")
    limits = {"max_input_tokens": int(os.environ["TERMINUS_PROMPT_TOKENS"])}
    limits["max_output_tokens"] = int(os.environ["TERMINUS_MAX_TOKENS"])
    agent = Terminus2(
        logs_dir=home, model_name=os.environ["TERMINUS_MODEL"], api_base=os.environ["OPENAI_API_BASE"],
        session_id="terminus", record_terminal_session=False, model_info=limits,
    )
    await agent.setup(Here())
    await agent.run(sys.stdin.read(), Here(), AgentContext())

asyncio.run(main())
"""


class Terminus2(Adapter):
    name = "terminus-2"
    package = PyPI("harbor", version="0.24.0", python=(3, 12))

    def _launch(self, request: LaunchRequest) -> Launch:
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": request.key,
            "OPENAI_API_BASE": f"{request.url}/v1",
            "TERMINUS_MODEL": f"openai/{request.model}",
            "TERMINUS_PROMPT_TOKENS": str(request.prompt_tokens),
            "TERMINUS_MAX_TOKENS": str(request.max_tokens),
        }
        return Launch(request.python(START), environment, stdin=request.prompt.encode())

    def shell_turn(self, command: str) -> ScriptedTurn:
        return _turn(command + "\n", complete=False)

    def final_turn(self) -> ScriptedTurn:
        return _turn("", complete=True)


def _turn(keystrokes: str, *, complete: bool) -> ScriptedTurn:
    commands = [{"keystrokes": keystrokes, "duration": 1.0}] if keystrokes else []
    return ScriptedTurn(
        json.dumps({"analysis": "It is clear.", "plan": "Do it.", "commands": commands, "task_complete": complete})
    )
