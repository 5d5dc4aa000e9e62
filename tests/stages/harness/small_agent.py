"""An agent in few lines, over chat completions; what it does wrong on purpose is said by its options."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL, KEY, *OPTIONS = sys.argv[1:]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def ask(messages, **more):
    body = {"model": "gpt-9", "messages": messages, "tools": TOOLS, **more}
    for option in OPTIONS:
        if option.startswith("--body="):
            body |= json.loads(Path(option.removeprefix("--body=")).read_text())
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def main():
    system = [option.removeprefix("--system=") for option in OPTIONS if option.startswith("--system=")]
    messages = [{"role": "system", "content": text} for text in system]
    messages.append({"role": "user", "content": sys.stdin.read()})
    while True:
        try:
            said = ask(messages)
        except urllib.error.HTTPError as error:
            print("refused:", error.code, error.read().decode(), file=sys.stderr)
            if "--stubborn" in OPTIONS:
                time.sleep(0.05)
                continue
            sys.exit(3)
        messages.append({"role": "assistant", "content": said["content"], "tool_calls": said.get("tool_calls", [])})
        if not said.get("tool_calls"):
            for option in OPTIONS:
                if option.startswith("--print="):
                    print(f"\x1b[1mbegin\x1b[0m {'.' * int(option.removeprefix('--print='))} end")
            return
        for call in said["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})


main()
