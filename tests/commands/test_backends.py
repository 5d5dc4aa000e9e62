"""`prorl backends` beside a service's front door, its backend broker and one engine host that answers by the book."""

from __future__ import annotations

import io
import json
import tempfile
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq
from msgspec.structs import replace
from rich.console import Console
from support.commands import complaint, prorl

from prorl_zmq import RolloutClient
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.commands.backend_tables import backend_table, detail_tables
from prorl_zmq.config import ServiceSettings, Topology
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Backend,
    BackendAlive,
    BackendStatus,
    EngineLoad,
    EngineStart,
)
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import AnyEngineRequest, EngineReady, UpdateTimes
from prorl_zmq.wire.messages.relay import CopyState, WeightSource
from prorl_zmq.wire.sockets import bind, open_socket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import CompletedProcess

WAIT_S = 30.0


class Service:
    """Both brokers in threads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        topology = Topology(service=ServiceSettings(run_dir=folder))
        self._brokers = (RolloutBroker(topology, Journal()), BackendBroker(topology))
        self._threads = [threading.Thread(target=broker.run) for broker in self._brokers]
        for thread in self._threads:
            thread.start()
        self.front_door = topology.endpoint(topology.rollout_broker.front_door)
        self.backend_broker = topology.endpoint(topology.backend_broker.endpoint)

    def run(self, *arguments: object) -> CompletedProcess[str]:
        return prorl("backends", *arguments, "--connect", self.front_door)

    def backends(self) -> tuple[BackendStatus, ...]:
        with RolloutClient(self.front_door, timeout_s=WAIT_S) as client:
            return client.backends.list()

    def close(self) -> None:
        for broker in self._brokers:
            broker.stop()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = Service(folder)
        try:
            yield service
        finally:
            service.close()


def test_copies_of_weights_and_who_fed_whom(service: Service) -> None:
    assert "no engine host keeps a copy" in service.run("weights").stdout
    state = CopyState("ab" * 32, "/copy", WeightSource("e", "ipc:///e.w"), 7, "c" * 64, 2**30, 2**21, 1.5)
    fed = replace(state, fed_by={"trainer": 2**20, "f": 2**20})
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(service.backend_broker)
        add = AddBackend("1", Backend(backend_id="e", endpoint="ipc:///tmp/e"), heartbeats=True, copy=state)
        for request in (add, BackendAlive("2", "e", 7, copy=fed)):
            socket.send_multipart([b"", codec.encode(request)])
            assert socket.poll(int(1000 * WAIT_S))
            socket.recv_multipart()
        (listed,) = service.backends()
        assert listed.copy == fed
        shown = service.run("weights").stdout
        assert all(part in shown for part in ("1.00 GiB", "2.0 MiB", "1.5", "trainer 50%", "f 50%", "ababab"))
        small = replace(fed, size_bytes=53092, fetched_bytes=512)
        socket.send_multipart([b"", codec.encode(BackendAlive("3", "e", 7, copy=small))])
        assert socket.poll(int(1000 * WAIT_S))
        socket.recv_multipart()
        shown = service.run("weights").stdout
        assert all(part in shown for part in ("51.8 KiB", "512 bytes"))
        seen = json.loads(service.run("list", "--json").stdout)
        assert [(one["backend"]["backend_id"], one["state"]) for one in seen["backends"]] == [("e", "ready")]
        assert (seen["starts"], seen["adapters"]) == ([], [])
        copies = json.loads(service.run("weights", "--json").stdout)["copies"]
        assert copies["e"]["fed_by"] == {"trainer": 2**20, "f": 2**20}
        assert copies["e"]["version"] == 7


def test_every_option_of_add_arrives(service: Service) -> None:
    options = ["--weight", "2.5", "--node", "n2", "--max-in-flight", "8", "--context-tokens", "4096"]
    options += ["--tokenizer", "/models/m", "--model", "m", "--weight-version", "3", "--model-name", "user", "--frozen"]
    assert service.run("add", "mine", "ipc:///tmp/mine", *options).returncode == 0
    assert service.run("add", "plain", "ipc:///tmp/plain").returncode == 0
    mine, plain = service.backends()
    assert mine.backend == Backend(
        backend_id="mine",
        endpoint="ipc:///tmp/mine",
        model="m",
        name="user",
        frozen=True,
        chat=ChatSettings(kind="transformers", tokenizer="/models/m"),
        weight_version=3,
        node="n2",
        weight=2.5,
        max_in_flight=8,
        context_tokens=4096,
    )
    assert plain.backend == Backend(backend_id="plain", endpoint="ipc:///tmp/plain")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bad", "http://127.0.0.1:8000"), "start `prorl-engine --engine http --url http://127.0.0.1:8000`"),
        (("bad", "127.0.0.1:8000"), "is not ipc://PATH or tcp://HOST:PORT"),
        (("bad", "ipc:///tmp/bad", "--weight", "0"), "backend.weight"),
        (("bad", "ipc:///tmp/bad", "--node", "a node"), "backend.node"),
        (("bad", "ipc:///tmp/bad", "--model-name", "a/model"), "backend.name"),
        (("not an id", "ipc:///tmp/bad"), "backend.backend_id"),
        (("bad", "ipc:///tmp/bad", "--max-in-flight", "0"), "--max-in-flight"),
    ],
)
def test_what_cannot_be_a_backend_is_refused_in_one_line(
    service: Service, arguments: tuple[str, ...], said: str
) -> None:
    assert said in complaint(service.run("add", *arguments))
    assert service.backends() == ()


def test_the_front_doors_request_at_the_backend_broker_is_told_where_to_go(service: Service) -> None:
    """The answer was `Invalid value 'hello'`."""
    done = prorl("status", "--connect", service.backend_broker)
    assert done.returncode == 2
    assert "`hello` is asked of the front door (`rollout_broker.front_door`), and this is the backend b" in done.stderr


def test_list_says_what_it_leaves_out_and_shows_it_on_request(service: Service) -> None:
    assert "an engine of `prorl serve` comes once it is ready" in " ".join(service.run("list").stdout.split())
    service.run("add", "mine", "ipc:///tmp/mine", "--model", "some-model")
    listed = service.run("list").stdout
    assert "--details" in listed
    assert "some-model" not in listed
    detailed = service.run("list", "--details").stdout
    for word in ("mine", "ready", "some-model", "ipc:///tmp/mine", "256"):
        assert word in detailed


@contextmanager
def answering_host(service: Service, requests: int = 1, *flags: str) -> Iterator[list[AnyEngineRequest]]:
    """Backend `mine`, whose engine host does the first things that it is asked; gives what they were."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asked: list[AnyEngineRequest] = []

    def answer(router: zmq.Socket[bytes]) -> None:
        while len(asked) < requests and router.poll(int(1000 * WAIT_S)):
            *envelope, frame = router.recv_multipart()
            request = codec.decode(frame, AnyEngineRequest)
            asked.append(request)
            ready = EngineReady(
                request.request_id, request.weight_version, times=UpdateTimes(1.5, 1.0, 0.25, 5 * 10**8)
            )
            router.send_multipart([*envelope, codec.encode(ready)])

    try:
        router = open_socket(context, zmq.ROUTER)
        service.run("add", "mine", bind(router, f"ipc://{service.folder}/engine"), *flags)
        host = threading.Thread(target=answer, args=(router,))
        host.start()
        yield asked
        host.join(WAIT_S)
    finally:
        context.destroy(linger=0)


def test_versions_are_told_to_each_engine_host(service: Service) -> None:
    with answering_host(service) as asked:
        done = service.run("set-version", "7")
    assert done.returncode == 0, done.stderr
    (request,) = asked
    assert request.step == "set"
    assert request.weight_version == 7
    assert [status.backend.weight_version for status in service.backends()] == [7]


def test_update_weights_asks_each_engine_host(service: Service, tmp_path: Path) -> None:
    with answering_host(service, 2) as asked:
        done = service.run("update-weights", tmp_path, "9", "--mode", "drain")
    assert done.returncode == 0, done.stderr
    fetch, request = asked
    assert (fetch.step, fetch.path, request.step) == ("fetch", str(tmp_path), "load")
    assert (request.path, request.weight_version, request.mode) == (str(tmp_path), 9, "drain")
    assert "mine read 953.7 MiB in 3.0 s while it generated, and paused for 0.25 s" in " ".join(done.stdout.split())
    assert [status.backend.weight_version for status in service.backends()] == [9]


def test_the_two_halves_of_an_update_ask_each_engine_host(service: Service) -> None:
    with answering_host(service, 3) as asked:
        begun = service.run("begin-weights", "9", "--mode", "abort", "--limit", "30")
        assert [status.state for status in service.backends()] == ["updating"]
        other = service.run("end-weights", "8")
        ended = service.run("end-weights", "9")
    assert begun.returncode == ended.returncode == 0, (begun.stderr, ended.stderr)
    assert "nothing is generated; end or cancel version 9 within 30 s" in begun.stdout
    assert other.returncode != 0
    assert "1 backend(s) serve version 9" in ended.stdout
    begin, _, end = asked
    assert begin.step == "begin"
    assert (begin.weight_version, begin.mode, begin.limit_s) == (9, "abort", 30.0)
    assert end.step == "end"
    assert [(status.state, status.backend.weight_version) for status in service.backends()] == [("ready", 9)]


def test_an_update_that_was_begun_is_cancelled(service: Service) -> None:
    with answering_host(service, 2) as asked:
        service.run("begin-weights", "9")
        done = service.run("cancel-weights", "9")
    assert done.returncode == 0, done.stderr
    assert asked[-1].step == "cancel"
    assert [(status.state, status.backend.weight_version) for status in service.backends()] == [("ready", 0)]


COMMANDS = (
    *("list", "add", "drain", "remove", "clear", "set-version"),
    *("update-weights", "begin-weights", "end-weights", "cancel-weights"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_teaches(command: str) -> None:
    done = prorl("backends", command, "--help")
    assert done.returncode == 0
    assert "Usage: prorl backends" in done.stdout


def test_the_table_names_the_models_where_there_are_several() -> None:
    policy = Backend(backend_id="engine-0", endpoint="ipc://0", weight_version=7)
    user = Backend(backend_id="engine-1", endpoint="ipc://1", name="user", frozen=True)
    rows = [BackendStatus(backend=one, state="ready", in_flight=0, assigned=0) for one in (policy, user)]
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(backend_table(tuple(rows[:1])))
    assert "model" not in narrow.export_text()
    narrow.print(backend_table(tuple(rows), (EngineStart("engine-2", "starting", "", "user"),)))
    cells = [
        [cell.strip() for cell in line.split("│")[1:4]] for line in narrow.export_text().splitlines() if "│" in line
    ]
    assert ["engine-0", "policy", "ready"] in cells
    assert ["engine-1", "user", "ready"] in cells
    assert ["engine-2", "user", "starting"] in cells


@pytest.mark.parametrize(
    ("load", "shown"),
    [(EngineLoad(), "0"), (EngineLoad(running=2), "–"), (EngineLoad(running=2, tokens_per_s=1234.5), "1,234")],
)
def test_no_rate_is_shown_while_no_turn_has_ended(load: EngineLoad, shown: str) -> None:
    backend = Backend(backend_id="b", endpoint="ipc://b")
    status = BackendStatus(backend=backend, state="ready", in_flight=0, assigned=0, load=load)
    wide = Console(width=120, record=True, file=io.StringIO())
    wide.print(backend_table((status,)))
    (row,) = [line for line in wide.export_text().splitlines() if line.startswith("│ b ")]
    assert [cell.strip() for cell in row.split("│")][5] == shown


def test_an_engine_without_the_events_that_it_should_have_is_named() -> None:
    backend = Backend(backend_id="b", endpoint="ipc://b")
    for lacks in (False, True):
        load = EngineLoad(lacks_events=lacks)
        wide = Console(width=120, record=True, file=io.StringIO())
        wide.print(backend_table((BackendStatus(backend=backend, state="ready", in_flight=0, assigned=0, load=load),)))
        assert ("b: its engine publishes no usable KV events" in wide.export_text()) is lacks


def test_tables_of_long_names_fit_80_columns_and_lose_nothing() -> None:
    backend = Backend(
        backend_id="engine-0.gpu-node-17.cluster",
        endpoint="ipc:///run/user/1000/prorl/engines/engine-0.gpu-node-17",
        model="Someone/Some-Model-235B-A22B-Instruct",
        weight_version=12_345,
        node="gpu-node-17.cluster",
        weight=2.5,
        max_in_flight=1024,
        context_tokens=131_072,
        version="0.1.0",
    )
    busy = EngineLoad(running=900, tokens_per_s=12_345.6, prompt_tokens=1000, cached_tokens=873, memory_bytes=3 * 2**29)
    busy = replace(busy, kv_tokens=12_345_678, kv_used=0.614, queued=1234, parked=7, preempted=56_789, again_tokens=42)
    rows = (
        BackendStatus(
            backend=backend,
            state="draining",
            in_flight=1000,
            assigned=5,
            room=1024,
            load=busy,
            silent_s=0.44,
            lease_s=10.0,
        ),
        BackendStatus(
            backend=Backend(backend_id="new", endpoint="ipc://new"),
            state="probation",
            problem="HTTP 500",
            next_try_s=6.8,
            in_flight=0,
            assigned=0,
        ),
        BackendStatus(
            backend=Backend(backend_id="idle", endpoint="ipc://i", warning="calls of its model are not read"),
            state="ready",
            in_flight=0,
            assigned=0,
            load=EngineLoad(prompt_tokens=100),
            fetching=7,
        ),
    )
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(backend_table(rows))
    narrow.print(detail_tables(rows))
    text = narrow.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "new: HTTP 500 (tried again in 7 s)" in text
    assert "idle: calls of its model are not read" in text
    assert "idle: its host fetches weights 7" in text
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    joined: list[list[str]] = []
    for line in cells:
        if line[1]:
            joined.append(line)
        else:
            joined[-1] = [above + below for above, below in zip(joined[-1], line, strict=True)]
    assert joined == [
        [backend.backend_id, "draining", "12345", "1000/1024", "12,346", "87%", "61%", backend.node],
        ["new", "probation", "0", "0", "–", "–", "–", "local"],
        ["idle", "ready", "0", "0", "0", "–", "–", "local"],
        [backend.backend_id, "2.5", "1024", "131072", backend.model, backend.endpoint],
        ["new", "1", "256", "–", "–", "ipc://new"],
        ["idle", "1", "256", "–", "–", "ipc://i"],
        [backend.backend_id, "0.4 s", "9.6 s", "1.50 GiB", "0.1.0"],
        [backend.backend_id, "12,345,678", "61%", "1234", "7", "56789", "4%"],
    ]


def test_weights_are_of_the_model_that_is_named(service: Service, tmp_path: Path) -> None:
    service.run("add", "policy-1", "ipc:///tmp/policy-1")
    with answering_host(service, 3, "--model-name", "b") as asked:
        refused = service.run("set-version", "7", "--model-name", "c")
        loaded = service.run("update-weights", tmp_path, "7", "--model-name", "b")
        declared = service.run("set-version", "8", "--model-name", "b")
    assert "no backend serves the model c (there are b, policy)" in " ".join(refused.stderr.split())
    assert "1 backend(s) serve version 7 of b after" in loaded.stdout
    assert "what 1 backend(s) generate from now on is of version 8" in declared.stdout
    assert [request.model for request in asked] == ["b", "b", "b"]  # type: ignore[union-attr]
    versions = {status.backend.backend_id: status.backend.weight_version for status in service.backends()}
    assert versions == {"mine": 8, "policy-1": 0}
