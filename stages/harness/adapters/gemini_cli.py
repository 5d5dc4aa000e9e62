"""Gemini CLI, over Gemini's generateContent.

The model always has one of Google's names, which is part of the URL's path; without one the program calls a router
model first. The name's window is 1 M tokens; the setting limits the used part of it.
"""

from __future__ import annotations

import json

from ..adapter import NODE, Adapter, Launch, LaunchRequest, Npm, ShellTool

MODEL = "gemini-2.5-pro"
WINDOW_TOKENS = 2**20


class GeminiCli(Adapter):
    name = "gemini-cli"
    package = Npm(
        "@google/gemini-cli",
        version="0.61.0",
        program="@google/gemini-cli/bundle/gemini.js",
        command="gemini",
        node=NODE,
    )
    takes_mcp = True
    shell = ShellTool("run_shell_command", more={"description": "Run a command"})

    def _launch(self, request: LaunchRequest) -> Launch:
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"compressionThreshold": request.prompt_tokens / WINDOW_TOKENS},
            "mcpServers": request.mcp_servers,
        }
        environment = {"GEMINI_API_KEY": request.key, "GOOGLE_GEMINI_BASE_URL": request.url}
        argv = (request.program("node"), request.program("gemini"), "-y", "-m", MODEL, *request.arguments)
        files = {".gemini/settings.json": json.dumps(settings)}
        return Launch(argv, environment, stdin=request.prompt.encode(), files=files)
