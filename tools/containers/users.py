"""The users of a sandbox, by the image's own `/etc/passwd`.

Which users a sandbox has depends on the kernel: a service that runs as root, or has subordinate ids (`/etc/subuid`),
can have all of an image's users in an Apptainer sandbox; otherwise there is one. Used in a forked child that has joined
the container, whose files are the agent's: nothing is imported.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import NamedTuple

from .forking import ExecFailed
from .namespaces import drop_capabilities

PASSWD, GROUP = "/etc/passwd", "/etc/group"
READ_BYTES = 2**20
_SETGID, _SETUID = 6, 7
"""Capabilities, by their numbers in `capabilities(7)`."""


class Account(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str


def find(user: str) -> Account:
    """Return the account of a user's name or number; a number may have none.

    Raises:
        ExecFailed: the image has no user of that name.
    """
    for fields in _rows(PASSWD, 7):
        if user in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            return Account(fields[0], int(fields[2]), int(fields[3]), fields[5] or "/")
    if user.isdecimal():
        return Account(user, int(user), int(user), "/")
    raise ExecFailed(errno.EINVAL, f"the sandbox's image has no user {user}")


def variables(account: Account) -> dict[str, str]:
    """Return the variables that a login sets."""
    return {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}


def become(account: Account) -> None:
    """Change this process to a user, without capabilities, unless it runs as that user already.

    Raises:
        ExecFailed: the kernel allows this sandbox no such user.
    """
    if account.uid == os.geteuid():
        return
    groups = [int(fields[2]) for fields in _rows(GROUP, 4) if account.name in fields[3].split(",")]
    try:
        drop_capabilities((_SETGID, _SETUID))
        with suppress(PermissionError):  # a user namespace with one group denies it
            os.setgroups(groups)
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    except OSError as error:
        words = f"this sandbox cannot have the user {account.name} ({account.uid}): {error.strerror}"
        raise ExecFailed(errno.EPERM, words) from error
    drop_capabilities()


def _rows(path: str, fields: int) -> list[list[str]]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        content = os.read(file, READ_BYTES)
    except OSError:  # a folder
        return []
    finally:
        os.close(file)
    rows = (line.split(":") for line in content.decode("utf-8", "replace").splitlines())
    return [row for row in rows if len(row) == fields and (fields != 4 or row[2].isdecimal())]
