"""OpenCode, over chat completions. It gets a title; otherwise it would ask the model for one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..adapter import Adapter, CallKind, Launch, LaunchRequest, Npm, ShellTool

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVIDER = "prorl"
SETTINGS = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


class OpenCode(Adapter):
    name = "opencode"
    package = Npm("opencode-ai", version="1.18.33", program="opencode-linux-{arch}/bin/opencode", command="opencode")
    takes_mcp = True
    shell = ShellTool("bash", more={"description": "Run a command"})

    def _launch(self, request: LaunchRequest) -> Launch:
        model = f"{PROVIDER}/{request.model}"
        limit = {"context": request.context_tokens, "output": request.max_tokens}
        config = {
            "provider": {
                PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{request.url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
                    "models": {request.model: {"name": request.model, "tool_call": True, "limit": limit}},
                }
            },
            "model": model,
            "small_model": model,
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
            "mcp": {
                name: {"type": "local", "command": [server.command, *server.args], "environment": server.env}
                for name, server in request.mcp.items()
            },
        }
        name = ".config/opencode/opencode.json"
        environment = {**SETTINGS, "OPENAI_API_KEY": request.key, "OPENCODE_CONFIG": f"{request.home}/{name}"}
        argv = (request.program("opencode"), "run", "--title", "task", "-m", model, *request.arguments)
        return Launch(argv, environment, stdin=request.prompt.encode(), files={name: json.dumps(config)})

    def kind_of(self, headers: Mapping[str, str]) -> CallKind | None:
        return CallKind.SUBAGENT if headers.get("x-parent-session-id") else None
