"""Record which processes start below a test, and which tests ask for a sandbox program or for HOME.

`support.costs` names this file's folder in PRORL_TEST_WATCH. Each Python of the environment that `make test` prepared
then imports this module when it starts (`.ci/watch_starts.pth`). The module appends one line per event to the file
named in PRORL_TEST_STARTS, with its process id at the end:

- `process`: this process starts another one, or forks;
- `interpreter`: this Python has started;
- `asks NAME`: code of the package looks for a sandbox program, or asks where the user's HOME is, or opens a file there.

Not seen: what programs other than Python start, other environments' Pythons, and `multiprocessing` with "spawn", of
which only the interpreter counts. Imports nothing that Python has not imported by then.
"""

from __future__ import annotations

import os
import posixpath
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SANDBOX_PROGRAMS = frozenset({"apptainer", "singularity", "bwrap", "debootstrap"})
PACKAGE = "/prorl_zmq/"
NAME_HOME = ("/tools/sandbox/sandboxes.py", "/tools/images/image.py", "/tools/images/staging.py")
"""Name HOME at each start of a service, and use nothing in it unless a job names an image."""
OPENS = frozenset({"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename"})
BETWEEN = ("/pathlib.py", "/os.py", "/shutil.py", "/tempfile.py", "<frozen os>")
"""Standard modules through which the package opens files."""
home = (os.environ.get("HOME", "").rstrip("/") or "/nowhere") + "/"
installed = (sys.prefix, sys.base_prefix, __file__.partition("/tests/support/")[0])
"""What may lie in the home without being the user's."""
file = os.environ.get("PRORL_TEST_STARTS", "")


def note(words: str) -> None:
    """Append a line. A process that cannot write it, for want of descriptors for instance, goes without."""
    try:
        target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        return
    try:
        os.write(target, f"{words} {os.getpid()}\n".encode())
    except OSError:
        pass
    finally:
        os.close(target)


def caller() -> str:
    """Return the file of the code that called what this module watches, behind standard modules."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.endswith(BETWEEN) or "/pathlib/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame.f_code.co_filename


def on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event in OPENS:
        path = arguments[0]
        if isinstance(path, str) and path.startswith(home) and not path.startswith(installed):
            asking = caller()
            if PACKAGE in asking and not asking.endswith(NAME_HOME):
                note("asks HOME")
    elif event == "subprocess.Popen":
        note("process")
    elif event == "os.posix_spawn":
        if sys._getframe(1).f_code.co_name != "_posix_spawn":  # else subprocess.Popen's own, counted above
            note("process")
    elif event == "exec" and "shutil" in unwrapped:
        wrap_which()


def before_fork() -> None:
    """Count forks, and starts by uvloop, which raise no event; a Popen with a `preexec_fn` has raised one."""
    if sys._getframe(1).f_code.co_name != "_execute_child":
        note("process")


def wrap_which() -> None:
    """Wrap `shutil.which` as soon as it is there: to import it here would slow each start."""
    shutil = sys.modules.get("shutil")
    which: Callable[..., str | None] | None = getattr(shutil, "which", None)
    if shutil is None or which is None:
        return
    unwrapped.discard("shutil")

    def watched(cmd: str, *arguments: object, **named: object) -> str | None:
        if cmd in SANDBOX_PROGRAMS and PACKAGE in caller():
            note(f"asks {cmd}")
        return which(cmd, *arguments, **named)

    shutil.which = watched  # type: ignore[attr-defined]


def wrap_expanduser() -> None:
    expanduser = posixpath.expanduser

    def watched(path: str) -> str:
        text = os.fspath(path)
        if isinstance(text, str) and text.startswith("~"):
            asking = caller()
            if PACKAGE in asking and not asking.endswith(NAME_HOME):
                note("asks HOME")
        return expanduser(path)

    posixpath.expanduser = watched  # type: ignore[assignment]


def begin() -> None:
    """Record from now on, once."""
    if begun:
        return
    begun.append(True)
    note("interpreter")
    wrap_expanduser()
    wrap_which()
    os.register_at_fork(before=before_fork)
    sys.addaudithook(on_event)


unwrapped = {"shutil"}
begun: list[bool] = []
if file:
    begin()
