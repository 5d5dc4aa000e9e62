"""Claude Code, over Anthropic's Messages API.

Switched off: features that change the prefix of later prompts (tool search, attribution, reminders of tokens left), and
calls that are not part of the work. For unknown models it assumes a window of 1 M tokens, so the window is set.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..adapter import Adapter, CallKind, Launch, LaunchRequest, Npm, ShellTool

if TYPE_CHECKING:
    from collections.abc import Mapping

MCP_FILE = ".mcp-servers.json"
SETTINGS = {
    "IS_SANDBOX": "1",  # otherwise it refuses to run as root
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "ENABLE_TOOL_SEARCH": "0",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
}


class ClaudeCode(Adapter):
    name = "claude-code"
    package = Npm(
        "@anthropic-ai/claude-code",
        version="2.1.330",
        program="@anthropic-ai/claude-code-linux-{arch}/claude",
        command="claude",
    )
    refusal_status = 403
    takes_mcp = True
    shell = ShellTool("Bash", more={"description": "Run a command"})

    def _launch(self, request: LaunchRequest) -> Launch:
        argv = ("-p", "--dangerously-skip-permissions", "--output-format", "json", "--model", request.model)
        environment = {
            **SETTINGS,
            "ANTHROPIC_BASE_URL": request.url,
            "ANTHROPIC_API_KEY": request.key,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(request.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(request.max_tokens),
        }
        servers = ("--mcp-config", f"{request.home}/{MCP_FILE}", "--strict-mcp-config") if request.mcp else ()
        files = {MCP_FILE: json.dumps({"mcpServers": request.mcp_servers})} if request.mcp else {}
        command = (request.program("claude"), *argv, *servers, *request.arguments)
        return Launch(command, environment, stdin=request.plain_prompt.encode(), files=files)

    def kind_of(self, headers: Mapping[str, str]) -> CallKind | None:
        return CallKind.SUBAGENT if headers.get("x-claude-code-agent-id") else None
