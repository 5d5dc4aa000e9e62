"""How each harness is started, and what its headers tell, without running it (see `test_real_harnesses` for that)."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.errors import ConfigError
from prorl_zmq.stages.harness.adapter import (
    Adapter,
    CallKind,
    Launch,
    LaunchRequest,
    McpCommand,
    known_harnesses,
    load_adapter,
)

NAMES = ("aider", "claude-code", "codex", "command", "gemini-cli", "mini-swe-agent", "openhands", "opencode", "pi")
NAMES += ("qwen-code", "terminus-2")
ARGUMENTS = ("my-agent", "--url={url}", "--model", "{model}")
PROMPTS = (
    "-p do it",
    "--help",
    "say {url} \"quoted\" 'text' $HOME `id`\nnext line\n",
    "x" * 200_000,
    "\U0001f600 \x7f",
)


def request(name: str, **changes: Any) -> LaunchRequest:
    settings: dict[str, Any] = {
        "url": "http://127.0.0.1:8123",
        "key": "a-secret-key",
        "model": "org/policy",
        "prompt": "do it",
        "home": "/tmp/home",
        "directory": "/workspace",
        "folder": "/harnesses/one",
        "context_tokens": 40_000,
        "max_tokens": 8_000,
        "arguments": ARGUMENTS if name == "command" else (),
    }
    return LaunchRequest(**(settings | changes))


def launched(name: str, **changes: Any) -> Launch:
    return load_adapter(name).launch(request(name, **changes))


def test_all_are_registered_under_their_names() -> None:
    assert set(NAMES) <= set(known_harnesses())
    assert [load_adapter(name).name for name in NAMES] == list(NAMES)


SERVER = {"shop": McpCommand("node", ["shop.js", 'a "b"'], {"KEY": 'x="y"'})}
STANDARD = {"mcpServers": {"shop": {"command": "node", "args": ["shop.js", 'a "b"'], "env": {"KEY": 'x="y"'}}}}
MCP_FILES = {
    "claude-code": ".mcp-servers.json",
    "command": "mcp-servers.json",
    "gemini-cli": ".gemini/settings.json",
    "qwen-code": ".qwen/settings.json",
}


@pytest.mark.parametrize("name", MCP_FILES)
def test_mcp_servers_are_in_the_harness_configuration(name: str) -> None:
    made = launched(name, mcp=SERVER)
    assert json.loads(made.files[MCP_FILES[name]]).items() >= STANDARD.items()
    assert "/tmp/home/.mcp-servers.json" in made.argv or name != "claude-code"
    assert made.environment.get("PRORL_MCP_CONFIG") == ("/tmp/home/mcp-servers.json" if name == "command" else None)


def test_mcp_servers_of_codex_and_opencode() -> None:
    setting = next(word for word in launched("codex", mcp=SERVER).argv if word.startswith("mcp_servers"))
    assert tomllib.loads(setting)["mcp_servers"] == STANDARD["mcpServers"]
    (config,) = launched("opencode", mcp=SERVER).files.values()
    server = {"type": "local", "command": ["node", "shop.js", 'a "b"'], "environment": {"KEY": 'x="y"'}}
    assert json.loads(config)["mcp"] == {"shop": server}


def test_an_unknown_harness_is_said() -> None:
    with pytest.raises(ConfigError, match=r"'claude' is not a kind of harness; installed are: .*claude-code"):
        load_adapter("claude")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_never_an_option_nor_too_long(name: str, prompt: str) -> None:
    made = launched(name, prompt=prompt)
    assert prompt not in made.argv
    assert all(len(word.encode()) < 128 * 1024 for word in (*made.argv, *made.environment.values()))
    assert (made.stdin.decode() == prompt) != (prompt in made.files.values())


@pytest.mark.parametrize("name", ["claude-code", "qwen-code", "aider"])
@pytest.mark.parametrize("prompt", ["/help me", " !ls is slow"])
def test_a_prompt_is_never_taken_for_a_command_of_the_harness(name: str, prompt: str) -> None:
    made = launched(name, prompt=prompt)
    assert f"Task: {prompt}" in {made.stdin.decode(), *made.files.values()}


@pytest.mark.parametrize("name", NAMES)
def test_the_key_is_in_no_argument_and_no_file(name: str) -> None:
    made = launched(name)
    assert not [word for word in made.argv if "a-secret-key" in word]
    assert not [text for text in made.files.values() if "a-secret-key" in text]
    assert name == "command" or "a-secret-key" in made.environment.values()


@pytest.mark.parametrize("name", NAMES)
def test_it_calls_the_model_and_lives_in_its_home(name: str) -> None:
    made = launched(name)
    everything = " ".join((*made.argv, *made.environment.values(), *made.files.values()))
    assert "http://127.0.0.1:8123" in everything
    assert "policy" in everything or name == "gemini-cli"
    assert made.environment["HOME"] == "/tmp/home"
    assert all(not path.startswith("/") and ".." not in path for path in made.files)
    assert name == "command" or made.argv[0].startswith("/harnesses/one/bin/")


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"command", "mini-swe-agent"}))
def test_it_is_told_how_long_a_context_is(name: str) -> None:
    short, long = (launched(name, context_tokens=tokens) for tokens in (40_000, 80_000))
    assert short != long


@pytest.mark.parametrize("name", NAMES)
def test_a_caller_adds_arguments_and_replaces_settings(name: str) -> None:
    made = launched(name, arguments=("--more",), environment={"HOME": "/elsewhere", "IS_SANDBOX": "0"})
    assert "--more" in made.argv
    assert (made.environment["HOME"], made.environment["IS_SANDBOX"]) == ("/elsewhere", "0")


def test_a_command_is_filled_in() -> None:
    arguments = ("run", "--to={url}/v1", "{prompt}", "{key}", "{other} {{model}}")
    environment = {"MODEL": "{model}"}
    made = launched("command", prompt="{url} as it is", arguments=arguments, environment=environment)
    expected = ("run", "--to=http://127.0.0.1:8123/v1", "{url} as it is", "a-secret-key", "{other} {org/policy}")
    assert made.argv == expected
    assert made.environment["MODEL"] == "org/policy"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "has no command line"), (("run", "{prompt}"), "has 200000 bytes, .* read the prompt from standard input")],
)
def test_a_command_that_cannot_run_is_said(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launched("command", prompt="x" * 200_000, arguments=arguments)


TURN = {"thread_id": "t2", "parent_thread_id": "t1", "thread_source": "subagent", "request_kind": "turn"}


@pytest.mark.parametrize(
    ("name", "headers", "expected"),
    [
        ("claude-code", {"x-claude-code-session-id": "s"}, None),
        (
            "claude-code",
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            CallKind.SUBAGENT,
        ),
        ("codex", {"x-codex-turn-metadata": json.dumps(TURN)}, CallKind.SUBAGENT),
        (
            "codex",
            {"x-codex-turn-metadata": '{"thread_id": "t", "request_kind": "turn", "thread_source": "user"}'},
            CallKind.MAIN,
        ),
        (
            "codex",
            {"x-codex-turn-metadata": '{"thread_id": "t", "request_kind": "compaction"}'},
            CallKind.COMPACTION,
        ),
        ("codex", {"thread-id": "t", "x-codex-parent-thread-id": "p"}, CallKind.SUBAGENT),
        ("codex", {"thread-id": "t", "x-codex-turn-metadata": "not JSON"}, None),
        ("codex", {"thread-id": "t", "x-codex-turn-metadata": "[" * 7000}, None),
        ("opencode", {"x-session-id": "s"}, None),
        ("opencode", {"x-session-id": "s", "x-parent-session-id": "p"}, CallKind.SUBAGENT),
        ("openhands", {"x-litellm-session-id": "s"}, None),
        ("terminus-2", {"x-session-id": "s"}, None),
        ("pi", {"x-session-id": "s"}, None),
    ],
)
def test_headers_say_what_a_call_is_for(name: str, headers: dict[str, str], expected: CallKind | None) -> None:
    assert load_adapter(name).kind_of(headers) == expected


@given(
    st.sampled_from(NAMES), st.text(), st.recursive(st.none() | st.text(), lambda each: st.lists(each), max_leaves=3)
)
def test_no_header_is_too_strange(name: str, text: str, value: Any) -> None:
    adapter = load_adapter(name)
    for header in (text, json.dumps(value), json.dumps({"thread_id": value, "request_kind": value})):
        names = ("x-codex-turn-metadata", "thread-id", "x-claude-code-agent-id", "x-session-id", "x-litellm-session-id")
        assert adapter.kind_of(dict.fromkeys(names, header)) in (None, *CallKind)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"aider", "command"}))
def test_a_script_can_have_it_run_commands(name: str) -> None:
    adapter = load_adapter(name)
    turn = adapter.write_turn("a file", "it's")
    assert "printf %s" in turn.text + json.dumps(dict(turn.arguments))
    assert adapter.final_turn() != turn


@pytest.mark.parametrize("name", ["aider", "command"])
def test_what_runs_no_commands_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match="runs no commands"):
        load_adapter(name).shell_turn("ls")


def test_a_name_that_differs_from_the_registered_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(load_adapter("pi")), "name", "other")
    with pytest.raises(ConfigError, match="has name = 'other'; write 'pi'"):
        load_adapter("pi")


def test_an_adapter_is_a_class_of_few_words() -> None:
    class Mine(Adapter):
        name = "mine"
        package = None

        def _launch(self, request: LaunchRequest) -> Launch:
            return Launch((request.program("mine"),), {"KEY": request.key})

    made = Mine().launch(request("mine"))
    assert made == Launch(("/harnesses/one/bin/mine",), {"HOME": "/tmp/home", "KEY": "a-secret-key"})
