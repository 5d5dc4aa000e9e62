from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.service.notify import Notifier

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("abstract", [False, True])
def test_each_state_is_a_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"@prorl-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(10)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        notifier.ready()
        notifier.status("waiting for\nX=1")
        notifier.watchdog()
        notifier.stopping()
        told = [manager.recv(4096) for _ in range(4)]
    assert told == [
        b"READY=1\nSTATUS=serving",
        b"STATUS=waiting for X=1",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=stopping",
    ]


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nonexistent/notify"}, {"NOTIFY_SOCKET": "x" * 200}])
def test_nobody_listens(environment: dict[str, str]) -> None:
    Notifier(environment).ready()


def test_a_manager_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(2000):
            notifier.watchdog()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_it_asks(environment: dict[str, str], expected: float | None) -> None:
    assert Notifier(environment).watchdog_s == expected
