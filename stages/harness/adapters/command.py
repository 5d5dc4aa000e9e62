"""Any program in the sandbox: the caller's command line with placeholders.

`{url}`, `{key}`, `{model}` and `{prompt}` are replaced in words and in the environment; other braces stay. The prompt
is also on standard input. OpenAI's and Anthropic's clients find address and key in the environment. `PRORL_MCP_CONFIG`
is the path of a JSON file with the job's MCP servers below `mcpServers`, if it has any.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from ....errors import ConfigError
from ..adapter import Adapter, Launch, LaunchRequest

PLACE = re.compile(r"\{(url|key|model|prompt)\}")
MCP_FILE = "mcp-servers.json"
WORD_LIMIT_BYTES = 128 * 1024


class Command(Adapter):
    name = "command"
    package = None
    takes_mcp = True

    def launch(self, request: LaunchRequest) -> Launch:
        environment = {name: _filled(text, request) for name, text in request.environment.items()}
        return super().launch(replace(request, environment=environment))

    def _launch(self, request: LaunchRequest) -> Launch:
        if not request.arguments:
            raise ConfigError("harness command has no command line; give its words as arguments", key="arguments")
        argv = tuple(_filled(word, request) for word in request.arguments)
        longest_bytes = max(len(word.encode()) for word in argv)
        if longest_bytes >= WORD_LIMIT_BYTES:
            raise ConfigError(
                f"a word of the command line has {longest_bytes} bytes, and Linux takes {WORD_LIMIT_BYTES - 1}; "
                "leave out {prompt} and read the prompt from standard input",
                key="arguments",
            )
        environment = {
            "OPENAI_BASE_URL": f"{request.url}/v1",
            "OPENAI_API_KEY": request.key,
            "ANTHROPIC_BASE_URL": request.url,
            "ANTHROPIC_API_KEY": request.key,
        }
        files = {}
        if request.mcp:
            environment["PRORL_MCP_CONFIG"] = f"{request.home}/{MCP_FILE}"
            files[MCP_FILE] = json.dumps({"mcpServers": request.mcp_servers})
        return Launch(argv, environment, stdin=request.prompt.encode(), files=files)


def _filled(text: str, request: LaunchRequest) -> str:
    return PLACE.sub(lambda found: str(getattr(request, found[1])), text)
