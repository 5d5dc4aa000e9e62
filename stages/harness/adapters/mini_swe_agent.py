"""mini-swe-agent, over chat completions, not streamed.

Its command `mini` takes the task only as an argument, so a line of Python passes it from standard input. It does not
stop soon at 400 or 403, and is killed.
"""

from __future__ import annotations

from ..adapter import Adapter, Launch, LaunchRequest, PyPI, ScriptedTurn, ShellTool

START = """\
import sys
from minisweagent.run.mini import app
sys.argv += ["--task=" + sys.stdin.read()]
app()
"""
SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class MiniSweAgent(Adapter):
    name = "mini-swe-agent"
    # Its litellm needs mcp without declaring it.
    package = PyPI("mini-swe-agent", version="2.4.6", also=("mcp",), python=(3, 10))
    shell = ShellTool("bash")

    def _launch(self, request: LaunchRequest) -> Launch:
        options = ("-y", "--exit-immediately", "-l", "0", "-m", f"openai/{request.model}")
        environment = {
            **SETTINGS,
            "OPENAI_API_KEY": request.key,
            "OPENAI_BASE_URL": f"{request.url}/v1",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{request.home}/mini-swe-agent",
        }
        return Launch(request.python(START, *options), environment, stdin=request.prompt.encode())

    def final_turn(self) -> ScriptedTurn:
        return self.shell_turn("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
