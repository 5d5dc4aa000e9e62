"""Codex, over OpenAI's Responses API.

Its address comes from a custom provider: the built-in one tries WebSockets first and ignores `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..adapter import Adapter, CallHints, CallKind, Launch, LaunchRequest, Npm, ScriptedTurn

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPACTION_AT = 0.9
"""Of the prompt's largest length: the summary must fit too."""
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

    def _launch(self, request: LaunchRequest) -> Launch:
        provider = (
            f'{{name="prorl",base_url={json.dumps(request.url + "/v1")},env_key="OPENAI_API_KEY",wire_api="responses"}}'
        )
        settings = (
            *SETTINGS,
            f"model_providers.prorl={provider}",
            f"model_context_window={request.context_tokens}",
            f"model_auto_compact_token_limit={int(request.prompt_tokens * COMPACTION_AT)}",
        )
        argv = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", request.model)
        flags = tuple(word for setting in settings for word in ("-c", setting))
        off = ("--disable", "plugins", "--disable", "goals")
        command = (request.program("codex"), *argv, *flags, *off, *request.arguments, "-")
        return Launch(command, {"OPENAI_API_KEY": request.key}, stdin=request.prompt.encode())

    def hints(self, headers: Mapping[str, str]) -> CallHints:
        told = _metadata(headers.get("x-codex-turn-metadata", ""))
        agent = told.get("thread_id") or headers.get("thread-id", "")
        parent = told.get("parent_thread_id") or headers.get("x-codex-parent-thread-id", "")
        subagent = told.get("thread_source") == "subagent" or bool(parent)
        kind: CallKind = ""
        if told.get("request_kind") == "compaction":
            kind = "compaction"
        elif subagent or "request_kind" in told:
            kind = "subagent" if subagent else "main"
        return CallHints(str(agent), str(parent), kind)

    def shell_turn(self, command: str) -> ScriptedTurn:
        return ScriptedTurn(tool="exec_command", arguments={"cmd": command})


def _metadata(header: str) -> dict[str, Any]:
    try:
        told = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
