"""Pi, over chat completions."""

from __future__ import annotations

import json

from ..adapter import NODE, Adapter, Launch, LaunchRequest, Npm, ShellTool

PROVIDER = "prorl"
KEPT_PART = 0.25
"""The share of the longest prompt that is kept unchanged when the history is compacted."""


class Pi(Adapter):
    name = "pi"
    package = Npm(
        "@earendil-works/pi-coding-agent",
        version="0.87.1",
        program="@earendil-works/pi-coding-agent/dist/bundle/cli.js",
        command="pi",
        node=NODE,
    )
    shell = ShellTool("bash")

    def _launch(self, request: LaunchRequest) -> Launch:
        model = {"id": request.model, "contextWindow": request.context_tokens, "maxTokens": request.max_tokens}
        provider = {
            "baseUrl": f"{request.url}/v1",
            "api": "openai-completions",
            "apiKey": "$OPENAI_API_KEY",
            "models": [model],
        }
        compaction = {
            "reserveTokens": request.max_tokens,
            "keepRecentTokens": int(request.prompt_tokens * KEPT_PART),
        }
        files = {
            ".pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}}),
            ".pi/agent/settings.json": json.dumps({"compaction": compaction}),
        }
        environment = {"PI_OFFLINE": "1", "OPENAI_API_KEY": request.key}
        argv = (request.program("node"), request.program("pi"), "-p", "--provider", PROVIDER, "--model", request.model)
        return Launch((*argv, *request.arguments), environment, stdin=request.prompt.encode(), files=files)
