"""Codex, over OpenAI's Responses API.

Its address comes from a custom provider: the built-in one tries WebSockets first and ignores `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..adapter import Adapter, CallKind, Launch, LaunchRequest, Npm, ShellTool

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPACTION_AT = 0.9
"""The share of the longest prompt at which it compacts: the summary must fit too."""
SETTINGS = (
    "model_provider=prorl",
    'web_search="disabled"',
    "analytics.enabled=false",
    "check_for_update_on_startup=false",
)


class Codex(Adapter):
    name = "codex"
    package = Npm(
        "@openai/codex", version="0.169.0", program="@openai/codex-linux-{arch}/vendor/*/bin/codex", command="codex"
    )
    takes_mcp = True
    shell = ShellTool("exec_command", "cmd")

    def _launch(self, request: LaunchRequest) -> Launch:
        provider = (
            f'{{name="prorl",base_url={json.dumps(request.url + "/v1")},env_key="OPENAI_API_KEY",wire_api="responses"}}'
        )
        settings = (
            *SETTINGS,
            f"model_providers.prorl={provider}",
            f"model_context_window={request.context_tokens}",
            f"model_auto_compact_token_limit={int(request.prompt_tokens * COMPACTION_AT)}",
            *(
                f"mcp_servers.{name}={{command={json.dumps(server.command)},args={json.dumps(server.args)},"
                f"env={{{','.join(f'{json.dumps(key)}={json.dumps(value)}' for key, value in server.env.items())}}}}}"
                for name, server in request.mcp.items()
            ),
        )
        argv = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", request.model)
        flags = tuple(word for setting in settings for word in ("-c", setting))
        off = ("--disable", "plugins", "--disable", "goals")
        command = (request.program("codex"), *argv, *flags, *off, *request.arguments, "-")
        return Launch(command, {"OPENAI_API_KEY": request.key}, stdin=request.prompt.encode())

    def kind_of(self, headers: Mapping[str, str]) -> CallKind | None:
        metadata = _metadata(headers.get("x-codex-turn-metadata", ""))
        if metadata.get("request_kind") == "compaction":
            return CallKind.COMPACTION
        parent = metadata.get("parent_thread_id") or headers.get("x-codex-parent-thread-id")
        if parent or metadata.get("thread_source") == "subagent":
            return CallKind.SUBAGENT
        return CallKind.MAIN if "request_kind" in metadata else None


def _metadata(header: str) -> dict[str, Any]:
    try:
        metadata = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
