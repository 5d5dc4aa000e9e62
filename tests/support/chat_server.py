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
        refused = "refuse" in str(body["messages"][-1]["content"])
        choice = {"message": self.message(body), "finish_reason": "stop"}
        answer = {"error": "no"} if refused else {"choices": [choice]}
        data = json.dumps(answer).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request's body."""
        last = body["messages"][-1]
        if body.get("tools") and last["role"] == "user":
            call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": "assistant", "content": f"I heard {last['content']}"}

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def chat_server(handler: type[ChatServer] = ChatServer) -> Iterator[str]:
    """Run the server; yield its address."""
    handler.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
