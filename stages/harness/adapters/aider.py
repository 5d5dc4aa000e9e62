"""Aider, over chat completions. It edits files and runs no commands, because it treats unanswered questions as no.

It commits nothing and creates no repository, so its work is in the files.
"""

from __future__ import annotations

import json

from ..adapter import Adapter, Launch, LaunchRequest, PyPI, ScriptedTurn

START = """\
import os, sys
from aider.main import main
sys.exit(main(sys.argv[1:] + ([] if os.path.exists(".git") else ["--no-git"])))
"""
TASK = ".aider-task"
METADATA = ".aider-models.json"
OFF = (
    *("--no-analytics", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", "--no-gitignore"),
    *("--no-suggest-shell-commands", "--no-detect-urls", "--no-pretty", "--no-fancy-input"),
    *("--no-auto-commits", "--no-dirty-commits"),
)


class Aider(Adapter):
    name = "aider"
    package = PyPI("aider-chat", version="0.86.2", python=(3, 10))

    def _launch(self, request: LaunchRequest) -> Launch:
        model = f"openai/{request.model}"
        limits = {
            "max_input_tokens": request.prompt_tokens,
            "max_tokens": request.context_tokens,
            "max_output_tokens": request.max_tokens,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        home = request.home
        options = ("--yes-always", *OFF, "--model", model, "--model-metadata-file", f"{home}/{METADATA}")
        history = tuple(f"--{kind}-history-file={home}/.aider-{kind}-history" for kind in ("input", "chat"))
        environment = {
            "OPENAI_API_KEY": request.key,
            "OPENAI_API_BASE": f"{request.url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        argv = (request.program("python"), "-c", START, *options, "--message-file", f"{home}/{TASK}")
        files = {TASK: request.plain_prompt, METADATA: json.dumps({model: limits})}
        return Launch((*argv, *history, *request.arguments), environment, files=files)

    def write_turn(self, path: str, content: str) -> ScriptedTurn:
        return ScriptedTurn(f"{path}\n```\n{content}\n```\n")
