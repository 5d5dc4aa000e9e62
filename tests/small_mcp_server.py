"""An MCP server of the standard library, over standard input and output, which behaves as its first argument says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
TOOL = {"name": "add", "description": "Adds two numbers.", "inputSchema": {"type": "object", "properties": {}}}
calls = 0


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(number, arguments):
    global calls
    calls += 1
    if MODE == "dies":
        sys.exit("out of paper")
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while MODE == "floods":
        send({"method": "notifications/message", "params": {"data": "x" * 100}})
    while MODE == "endless":
        sys.stdout.write("x" * 100_000)
    if MODE == "huge" and calls == 1:
        text = "x" * 20_000_000
    else:
        text = f"{arguments.get('a', 0) + arguments.get('b', 0)}, call {calls}"
    send({"id": number, "result": {"content": [{"type": "text", "text": text}]}})


print("a print that is no message", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize" if MODE == "hangs":
            time.sleep(600)
        case "initialize":
            send({"id": message["id"], "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}})
        case "tools/list":
            send({"id": message["id"], "result": {"tools": [TOOL]}})
        case "tools/call" if MODE == "deaf":
            time.sleep(600)
        case "tools/call":
            call(message["id"], message["params"]["arguments"])
if MODE == "saves":
    Path("saved.txt").write_text(f"{calls} calls")
