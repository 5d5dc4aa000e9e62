"""Waiting primitives of the asyncio client. `blocking.transport` has the same names; both are written by hand."""

from __future__ import annotations

from asyncio import Lock, sleep
from asyncio import to_thread as in_thread

from ...security.request_connection import AsyncRequestConnection

__all__ = ["AsyncRequestConnection", "Lock", "in_thread", "sleep"]
