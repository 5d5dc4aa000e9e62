"""The agent of the OpenHands SDK, as its command-line preset configures it, over chat completions.

The SDK has no command: a short script starts the agent with the prompt from standard input.
"""

from __future__ import annotations

from ..adapter import Adapter, Launch, LaunchRequest, PyPI, ShellTool

START = """\
import os, sys
from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
llm = LLM(
    model=os.environ["LLM_MODEL"],
    api_key=os.environ["LLM_API_KEY"],
    base_url=os.environ["LLM_BASE_URL"],
    max_input_tokens=int(os.environ["LLM_MAX_INPUT_TOKENS"]),
    max_output_tokens=int(os.environ["LLM_MAX_OUTPUT_TOKENS"]),
    timeout=3600,  # its replies are not streamed, and an engine may be paused for longer than its own 300 s
)
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
conversation.run()
status = conversation.state.execution_status.value
print(status)
sys.exit(status != "finished")
"""


class OpenHands(Adapter):
    name = "openhands"
    package = PyPI("openhands-sdk", version="1.58.2", also=("openhands-tools=={version}",), python=(3, 12))
    shell = ShellTool("terminal")

    def _launch(self, request: LaunchRequest) -> Launch:
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LLM_MODEL": f"openai/{request.model}",
            "LLM_API_KEY": request.key,
            "LLM_BASE_URL": f"{request.url}/v1",
            "LLM_MAX_INPUT_TOKENS": str(request.prompt_tokens),
            "LLM_MAX_OUTPUT_TOKENS": str(request.max_tokens),
        }
        return Launch(request.python(START), environment, stdin=request.prompt.encode())
