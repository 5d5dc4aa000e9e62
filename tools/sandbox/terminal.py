"""A controlling terminal, handed from a forked child to the process that it becomes in another process namespace."""

from __future__ import annotations

import fcntl
import os
import signal
import termios


def give_up() -> None:
    """In the session's leader: let the terminal on standard input go, without the hang-up that this means.

    Raises:
        OSError: it has none.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
    fcntl.ioctl(0, termios.TIOCNOTTY)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)


def take() -> None:
    """Lead a new session on the terminal on standard input; output comes as it is written, input is not echoed.

    Raises:
        OSError: it is another session's.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    modes = termios.tcgetattr(0)
    modes[1] &= ~termios.ONLCR
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, modes)
