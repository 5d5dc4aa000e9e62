"""A harness of a few lines, with an adapter of its own, that pip installs from a folder: no registry is asked."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = ("1.0", "2.0")
PROGRAM = """
import json, os, subprocess, sys, urllib.request

def main():
    mood = os.environ.get("TINY_MOOD", "")
    if mood == "silent":
        sys.exit("it has nothing to say")
    messages = [{"role": "user", "content": sys.stdin.read()}]
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    name = "other" if mood == "other-tool" else "run"
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    while True:
        body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": tools}).encode()
        request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Bearer " + os.environ["KEY"])
        with urllib.request.urlopen(request, timeout=30) as response:
            said = json.load(response)["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            if mood != "idle":
                subprocess.run(["bash", "-c", json.loads(call["function"]["arguments"])["command"]], check=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    print(said["content"], os.environ["HOME"])
    if mood == "fails":
        sys.exit(3)
"""
ADAPTER = """
import os
from prorl_zmq.stages.harness.adapter import Adapter, Launch, PyPI, ScriptedTurn

class Tiny(Adapter):
    name = "tiny"
    package = PyPI("tiny-harness", version="1.0")

    def _launch(self, request):
        argv = (request.program("python"), "-c", "import tiny_harness; tiny_harness.main()")
        environment = {"URL": request.url, "KEY": request.key, "MODEL": request.model}
        environment["TINY_MOOD"] = os.environ.get("TINY_MOOD", "")
        return Launch(argv, environment, stdin=request.prompt.encode())

    def shell_turn(self, command):
        return ScriptedTurn(tool="run", arguments={"command": command})
"""


def offer(folder: Path) -> dict[str, str]:
    """Write the harness and its adapter below a folder; return the environment in which both are found."""
    info = folder / "tiny_adapter-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prorl_zmq.harnesses]\ntiny = tiny_adapter:Tiny\n")
    (folder / "tiny_adapter.py").write_text(ADAPTER)
    wheels = folder / "wheels"
    wheels.mkdir()
    for version in VERSIONS:
        _write_wheel(wheels, version)
    return {
        "PYTHONPATH": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PRORL_HARNESSES": str(folder / "harnesses"),
    }


def _write_wheel(folder: Path, version: str) -> None:
    info = f"tiny_harness-{version}.dist-info"
    files = {
        "tiny_harness.py": PROGRAM,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-harness\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"tiny_harness-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
