"""`Notifier`: sends the supervisor's state to systemd (`sd_notify(3)`); without `$NOTIFY_SOCKET` it does nothing.

Undeliverable datagrams are dropped.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Reports the state of the service to systemd."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        named = os.environ if environment is None else environment
        address = named.get("NOTIFY_SOCKET", "")
        # A leading @ means the NUL of the abstract namespace.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(named)
        """Interval of WATCHDOG=1, half of the manager's limit; None: not requested."""

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=serving")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def status(self, text: str) -> None:
        self._send(f"STATUS={' '.join(text.split())}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as line:
                line.sendto(state.encode(), self._address)
        except OSError:
            return


def _watchdog_s(named: Mapping[str, str]) -> float | None:
    allowed_us = named.get("WATCHDOG_USEC", "")
    if named.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not allowed_us.isdecimal():
        return None
    return int(allowed_us) / 2e6 or None
