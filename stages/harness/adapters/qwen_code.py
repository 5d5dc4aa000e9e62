"""Qwen Code, over chat completions."""

from __future__ import annotations

import json

from ..adapter import NODE, Adapter, Launch, LaunchRequest, Npm, ShellTool


class QwenCode(Adapter):
    name = "qwen-code"
    package = Npm(
        "@qwen-code/qwen-code",
        version="0.24.4",
        program="@qwen-code/qwen-code/cli-entry.js",
        command="qwen",
        executables=("@qwen-code/qwen-code/vendor/ripgrep/{arch}-linux/rg",),
        node=NODE,
    )
    takes_mcp = True
    shell = ShellTool("run_shell_command", more={"is_background": False})

    def _launch(self, request: LaunchRequest) -> Launch:
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "model": {"generationConfig": {"contextWindowSize": request.context_tokens}},
            "mcpServers": request.mcp_servers,
        }
        environment = {
            "OPENAI_API_KEY": request.key,
            "OPENAI_BASE_URL": f"{request.url}/v1",
            "OPENAI_MODEL": request.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(request.max_tokens),
        }
        argv = (request.program("node"), request.program("qwen"), "-y", "--auth-type", "openai", *request.arguments)
        files = {".qwen/settings.json": json.dumps(settings)}
        return Launch(argv, environment, stdin=request.plain_prompt.encode(), files=files)
