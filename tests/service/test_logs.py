"""What a whole service writes to its log, and what never gets into it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from support.services import started

from prorl_zmq import Job, RolloutClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPOLOGY = """
[service]
log_format = "json"
[rollout_broker]
heartbeat_s = 0.2
lease_s = 2.0
[sandbox]
kind = "process"
"""


def test_every_line_of_a_service_is_json_and_those_of_a_job_say_so(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text(TOPOLOGY)
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        flags = ("--config", str(config), "--run-dir", folder, "--log-level", "debug")
        with started("prorl", "serve", *flags) as program:
            program.wait_line("ready at")
            shell = Job(task="shell", instance={"instruction": "Write 1 to a.txt.", "check": "echo 'reward: 1'"})
            with RolloutClient(f"ipc://{folder}/front_door") as client:
                client.submit(shell)
                (trajectory,) = client.stream(timeout_s=60)
            assert trajectory.outcome == "completed"
            os.kill(program.child("stage_eval.json"), signal.SIGKILL)
            program.wait_line("was ended by a signal (Killed)")
            os.kill(program.child("engine-0.engine"), signal.SIGKILL)
            program.wait_line("engine-0 was ended by a signal (Killed) (log: the standard error of prorl serve)")
    lines = [json.loads(line) for line in program.lines]
    assert all({"time", "level", "logger", "process", "event"} <= set(line) for line in lines)
    of_job = [line for line in lines if line.get("job_id") == shell.job_id]
    assert all(line["attempt"] == 1 for line in of_job)
    by_process = {line["process"].partition("-")[0] for line in of_job}
    assert {"rollout", "init", "run", "eval"} <= by_process
    events = [line["event"] for line in of_job if line["process"] == "rollout-broker"]
    assert [event.partition(" given")[0] for event in events] == [
        *("queued for init", "init", "queued for run", "run", "queued for eval", "eval"),
        "ended as completed",
    ]


class Echo(BaseHTTPRequestHandler):
    """A server that quotes the key that it refuses."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = f"no such key: {self.headers['Authorization']}\x1b[31m\nINFO forged".encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Write nothing."""


@pytest.fixture
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_key_is_never_in_the_log_even_where_the_server_quotes_it(echo: str, log_format: str) -> None:
    key = "sk-0123456789abcdef"
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        flags = ("--engine", "http", "--url", echo, "--run-dir", folder, "--log-format", log_format)
        environment = {**os.environ, "PRORL_API_KEY": key}
        with started("prorl-engine", *flags, "--log-level", "debug", environment=environment) as program:
            program.wait_line("[secret]")
    assert key not in program.log
    assert "\x1b" not in program.log
    assert not any(line.startswith("INFO forged") for line in program.lines)
