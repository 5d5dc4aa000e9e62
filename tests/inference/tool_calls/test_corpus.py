"""Outputs of models that others collected (the package canitoolcall), and the calls that are in them.

Compared are the names and arguments of the calls. Of an output that was cut off, no call is right.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import canitoolcall
import pytest

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

OUTPUTS = {
    "deepseek_v3": 17,
    "deepseek_v31": 12,
    "dsml": 56,
    "gemma4": 48,
    "glm": 51,
    "harmony": 51,
    "hermes": 50,
    "kimi_k2": 26,
    "kimi_k3": 23,
    "llama3": 24,
    "llama4": 10,
    "mistral": 47,
    "qwen3_coder": 54,
}
"""How many outputs there are of each form; all are read right."""
REASONING = {
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}


def form_of(family: str, model: str) -> str:
    if family == "deepseek":
        return "deepseek_v31" if "V3.1" in model else "dsml" if "V3.2" in model or "V4" in model else "deepseek_v3"
    if family == "llama":
        return "llama4" if "Llama-4" in model else "llama3"
    if family == "kimi":
        return "kimi_k3" if "K3" in model else "kimi_k2"
    return {"qwen3-hermes": "hermes", "qwen3-xml": "qwen3_coder", "gpt-oss": "harmony"}.get(family, family)


@lru_cache(1)
def outputs() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for family in sorted(Path(canitoolcall.__file__).parent.glob("_data/fixtures/*/family.json")):
        models = json.loads(family.read_text(encoding="utf-8"))["reference_models"]
        prompts = {model["repo"]: model["default_generation_prompt"] for model in models}
        for path in sorted(family.parent.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                output = json.loads(line)
                model = output["models"][0]
                output["generation_prompt"] = output.get("generation_prompt") or prompts.get(model, "")
                found.setdefault(form_of(output["family"], model), []).append(output)
    return found


def without_reasoning(name: str, output: dict[str, Any]) -> str:
    """Return an output without its reasoning, as `TemplateTraits.split` does."""
    text: str = output["raw_output"]
    if (parts := FORMS[name].split(text)) is not None:
        return parts[1]
    before, after = REASONING.get(name, ("<think>", "</think>"))
    if text.lstrip().startswith(before):
        text = text.lstrip()[len(before) :]
    elif not output["generation_prompt"].rstrip().endswith(before):
        return text
    _, closed, rest = text.partition(after)
    return rest if closed else text[len(FORMS[name].before_calls(text)) :]


def test_every_form_of_the_corpus_is_covered() -> None:
    assert {name: len(found) for name, found in outputs().items()} == OUTPUTS


@pytest.mark.parametrize("name", OUTPUTS)
def test_calls_in_outputs_of_models(name: str) -> None:
    for output in outputs()[name]:
        found = FORMS[name].parse(without_reasoning(name, output), output["tools"])
        expected = output.get("expected") or {"tool_calls": []}
        calls = [{"name": call.name, "arguments": call.arguments} for call in found if isinstance(call, ToolCall)]
        assert _exact(calls) == _exact(expected["tool_calls"]), output["id"]
        for call in found:
            assert not isinstance(call, MalformedCall) or FORMS[name].example in call.feedback


def _exact(value: Any) -> Any:
    """Return a value of JSON in which 1 is 1.0, and neither is true."""
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)
