"""An OpenAI-style server on loopback: it repeats what it heard, calls a tool where it may, refuses where asked to."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class ChatServer(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    """The `Authorization` and the body of each request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers["Authorization"], body))
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": f"I heard {last['content']}"}
        if body.get("tools") and last["role"] == "user":
            call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        refused = "refuse" in str(last["content"])
        answer = {"error": "no"} if refused else {"choices": [{"message": message, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[str]:
    """Run the server; yield its address."""
    ChatServer.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
