"""The program that runs an agent's cells inside a sandbox. It is passed in as text, never loaded from the image.

It needs only Python 3.8 and its standard library, and uses IPython's `InteractiveShell` where the image has it; without
IPython cells run by plain `exec`: no magics, no `!command`. Its other side is `ipython_session.PythonProcess`.

    control socket   frames of a header (length of the rest, number of the cell, kind) and a content:
                     to us    C  the cell's code, UTF-8
                     from us  R  ready, F  cannot start, I  an image (PNG), D  the cell is done; all but I hold JSON
    descriptor 1, 2  one pipe, for all that the cell and its children write

All text goes through the pipe, in order; only images use the socket. When a cell's D is sent, all that its main thread
wrote is in the pipe. sys.stdout, sys.stderr and both descriptors are restored before each cell. Interrupts count only
while a cell runs.

A process that a cell forks cannot answer: the socket is closed in it, and it ends when it returns here. Damage beyond
repair (the socket closed, IPython itself broken) ends this process; the other side starts a new one.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import fcntl
import html
import io
import json
import linecache
import os
import re
import signal
import struct
import sys
import tempfile
import traceback
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

HEADER = struct.Struct("!IIc")
CELL, READY, FAILED, IMAGE, DONE = b"C", b"R", b"F", b"I", b"D"
IMAGE_LIMIT_BYTES = 8 * 2**20
IMAGES = 64
"""Most images of one cell that are sent; the other side keeps fewer. An empty one stands for each omitted one."""
NAME_LIMIT, WORDS_LIMIT = 200, 4000
CANCEL_LIMIT_S = 0.5
"""How long an interrupted coroutine may take to end."""
PRIVATE_DESCRIPTORS = 500
"""Ours are numbered from here, out of reach of code that closes all it finds beyond 2."""
RICH = ("text/markdown", "text/latex", "text/html", "application/json")
"""Forms that say more than a text that only names the object's class, best first."""
HTML = ((r"(?is)<(script|style)\b.*?</\1>", ""), (r"(?i)<(br|tr|p|div|li)\b", "\n<"), (r"<[^>]*>", " "))
"""Substitutions that turn HTML into text, in this order."""
NO_MAGICS = "(IPython is not installed here, so there are no %magics and no !commands; use subprocess instead)"


class Control:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = _private(descriptor)
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Close it in this process; that of another one stays open."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next frame's number and content, None at the end of the stream."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        length, number, _ = HEADER.unpack(header)
        content = self._read(length)
        return None if content is None else (number, content)

    def send(self, number: int, kind: bytes, content: bytes | dict[str, str]) -> None:
        """Send a frame: bytes as they are, anything else as JSON."""
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        view = memoryview(HEADER.pack(len(content), number, kind) + content)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            more = os.read(self._descriptor, size - len(data))
            if not more:
                return None
            data += more
        return bytes(data)


class Stream(io.TextIOWrapper):
    """What sys.stdout and sys.stderr are: unbuffered, so all output keeps its order."""

    def write(self, text: str) -> int:
        written = super().write(text)
        self.flush()
        return written


class Driver:
    """Runs cells, one after the other, until the control socket ends."""

    def __init__(self, control: int) -> None:
        self._control = Control(control)
        self._output = _private(1, keep=True)
        self._pid = os.getpid()
        self._number = 0
        self._images = 0
        self._stdout, self._stderr = _stream(1), _stream(2)
        self._loop: Any = None
        self._flush_c = _c_flush()
        self._shell: Any
        builtins.input = _no_input
        self._builtins, self._snapshot = vars(builtins), dict(vars(builtins))

    def serve(self, *, need_ipython: bool) -> None:
        self._prepare()
        try:
            self._shell = ipython_shell(self)
            version, problem = self._shell.version, ""
        except Exception as error:  # noqa: BLE001 - an IPython that cannot be imported may raise anything
            if need_ipython:
                self._control.send(0, FAILED, {"words": f"{type(error).__name__}: {error}"[:WORDS_LIMIT]})
                return
            self._shell, version, problem = PlainShell(self), "", f"{type(error).__name__}: {error}"[:WORDS_LIMIT]
        self._snapshot.update(vars(builtins))
        self._shell.warm()
        self._clean_up()
        sys.argv[:] = [""]
        sys.path.insert(0, "")
        self._control.send(0, READY, {"python": sys.version.split()[0], "ipython": version, "problem": problem})
        while True:
            frame = self._control.receive()
            if frame is None:
                return
            self._number, code = frame
            self._prepare()
            name = self._run(code.decode("utf-8", "replace"))
            self._clean_up()
            if os.getpid() != self._pid:
                os._exit(0)
            if self._shell.leaving:
                return
            self._control.send(self._number, DONE, {"error": name, "directory": _directory()})

    def show(self, bundle: dict[str, Any]) -> None:
        """Write an object's best text to sys.stdout, and send its image."""
        if bundle.get("image/png") is not None:
            image = png_bytes(bundle["image/png"])
            self._images += 1
            fits = self._images <= IMAGES and len(image) <= IMAGE_LIMIT_BYTES
            self._control.send(self._number, IMAGE, image if fits else b"")
        text = best_text(bundle)
        if text:
            sys.stdout.write(text + "\n")

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell's coroutine on the session's event loop. Tasks that it leaves continue when the next one runs."""
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.done():
                raise
            # Left alone, it would continue with the next cell that awaits something.
            task.cancel()
            loop.run_until_complete(asyncio.wait({task}, timeout=CANCEL_LIMIT_S))
            if not task.done() or task.cancelled():
                raise
            return task.result()

    def _run(self, code: str) -> str:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            error = self._shell.run(code)
            signal.signal(signal.SIGINT, _pass_over)
        except KeyboardInterrupt as interrupt:
            # It came before the cell began, or after it ended, or while its error was being shown.
            signal.signal(signal.SIGINT, _pass_over)
            self._stderr.write("KeyboardInterrupt\n")
            error = interrupt
        return "" if error is None else type(error).__name__[:NAME_LIMIT]

    def _prepare(self) -> None:
        if self._stdout.closed or self._stderr.closed:
            self._stdout, self._stderr = _stream(1), _stream(2)
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[misc]
        self._images = 0
        signal.signal(signal.SIGINT, _pass_over)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _clean_up(self) -> None:
        for name, value in self._snapshot.items():
            self._builtins.setdefault(name, value)
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)
        for stream in (sys.stdout, sys.stderr, self._stdout, self._stderr):
            with contextlib.suppress(Exception):  # a cell may have put anything there, or closed it
                stream.flush()
        self._flush_c()


class PlainShell:
    def __init__(self, driver: Driver) -> None:
        self.leaving = False
        self._driver = driver
        self._cells = 0
        self._main = types.ModuleType("__main__")
        self._main.__dict__.update(display=self._display, __builtins__=builtins)
        sys.modules["__main__"] = self._main
        builtins.exit = builtins.quit = self._leave  # type: ignore[assignment]
        os.environ.setdefault("MPLBACKEND", "Agg")

    def warm(self) -> None:
        """Run once what all cells run."""
        self.run("None")

    def run(self, code: str) -> BaseException | None:
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            self._run(code, name)
            self._show_figures()
        except SystemExit as error:
            if not self.leaving:
                print(f"SystemExit: {error.code} (the session continues; exit() ends it)", file=sys.stderr)
            return error
        except BaseException as error:  # noqa: BLE001 - the boundary to the agent's code
            shown: types.TracebackType | None = error.__traceback__
            while shown is not None and shown.tb_frame.f_globals is globals():
                shown = shown.tb_next
            print("".join(traceback.format_exception(type(error), error, shown)), end="", file=sys.stderr)
            if isinstance(error, SyntaxError) and any(line.lstrip()[:1] in ("%", "!") for line in code.splitlines()):
                print(NO_MAGICS, file=sys.stderr)
            return error
        return None

    def _run(self, code: str, name: str) -> None:
        tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST, True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._execute(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True))
        if last is not None:
            expression = ast.Expression(last.value)
            value = self._execute(compile(expression, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True))
            if value is not None:
                self._main.__dict__["_"] = value
                self._display(value)

    def _execute(self, code: types.CodeType) -> Any:
        value = eval(code, self._main.__dict__)  # noqa: S307 - it is what this program is for
        return self._driver.wait_for(value) if code.co_flags & 0x80 else value  # CO_COROUTINE

    def _display(self, *values: Any) -> None:
        for value in values:
            image = getattr(value, "_repr_png_", None)
            self._driver.show({"text/plain": repr(value), "image/png": image() if callable(image) else None})

    def _show_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            file = io.BytesIO()
            pyplot.figure(number).savefig(file, format="png")
            self._driver.show({"text/plain": repr(pyplot.figure(number)), "image/png": file.getvalue()})
        pyplot.close("all")

    def _leave(self, code: Any = None) -> None:
        self.leaving = True
        raise SystemExit(code)


def ipython_shell(driver: Driver) -> Any:
    """Make IPython's shell without history file, completion, tips and profile."""
    hidden = {"jedi"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # it takes 0.1 s, and nothing here completes
    try:
        from IPython import __version__ as version
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.core.profiledir import ProfileDir
        from traitlets.config import Config
    finally:
        for name in hidden:
            del sys.modules[name]
    memory: dict[str, Any] = {}

    class Shell(InteractiveShell):
        """What differs from a shell at a terminal."""

        leaving = False
        db = property(lambda _: memory, lambda *_: None)
        enable_gui = staticmethod(lambda *_, **__: None)

        def ask_exit(self) -> None:
            self.leaving = True

        def init_display_formatter(self) -> None:
            formatter: Any = _formatter_class()(parent=self)
            self.display_formatter = formatter
            self.configurables.append(formatter)

        def _tee(self, channel: str) -> Any:
            del channel
            return contextlib.nullcontext()  # it would keep all output for ever

        def system(self, cmd: str) -> None:
            # IPython's own goes through a terminal, polls it, and swallows an interrupt.
            import subprocess

            expand: Any = self.var_expand
            command = expand(cmd, depth=1)
            self.user_ns["_exit_code"] = subprocess.call(command, shell=True, executable=program)  # noqa: S602

        def run(self, code: str) -> Any:
            run: Any = self.run_cell
            result = run(code, store_history=True)
            return result.error_before_exec or result.error_in_exec

        def warm(self) -> None:
            shell: Any = self
            shell.run_cell("None", store_history=False)
            driver.show(shell.display_formatter.format(1)[0])

    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    program = os.environ.get("SHELL", "")
    if not os.access(program, os.X_OK):
        program = os.environ["SHELL"] = "/bin/sh"
    options = Config()
    options.HistoryManager.enabled = False
    options.HistoryManager.hist_file = ":memory:"
    options.InteractiveShell.colors = "nocolor" if int(version.split(".")[0]) >= 9 else "NoColor"
    hook, publisher = _display_classes(driver)
    # Some versions make a database in the profile's folder; nothing is to be left of it, least of all in the workspace.
    with tempfile.TemporaryDirectory() as folder:
        shell: Any = Shell.instance(
            config=options,
            ipython_dir=folder,
            profile_dir=ProfileDir(location=folder),
            displayhook_class=hook,
            display_pub_class=publisher,
        )
    shell.version = version
    shell.loop_runner = driver.wait_for
    return shell


def _formatter_class() -> Any:
    from IPython.core.formatters import DisplayFormatter

    class Formatter(DisplayFormatter):
        """Asks an object for text and PNG, and for more only if its text is no more than its class's name."""

        def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
            give: Any = super().format
            if include or exclude:
                return give(obj, include, exclude)
            bundle, about = give(obj, {"text/plain", "image/png"})
            if bundle and "image/png" not in bundle and _only_names(bundle.get("text/plain", "")):
                more, more_about = give(obj, set(RICH))
                bundle.update(more)
                about.update(more_about)
            return bundle, about

    return Formatter


def _display_classes(driver: Driver) -> tuple[Any, Any]:
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher

    class Hook(DisplayHook):
        # log_output would keep all output for ever.
        write_output_prompt = log_output = staticmethod(lambda *_: None)

        def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
            del md_dict
            driver.show(format_dict)

    class Publisher(DisplayPublisher):
        clear_output = staticmethod(lambda *_, **__: None)

        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            driver.show(data)

    return Hook, Publisher


def _private(descriptor: int, *, keep: bool = False) -> int:
    """Move a descriptor to a high number, and hide it from programs that cells start."""
    try:
        ours = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, PRIVATE_DESCRIPTORS)
    except OSError:  # fewer descriptors than that are allowed
        ours = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    if not keep:
        os.close(descriptor)
    return ours


def _stream(descriptor: int) -> Stream:
    """Make a text stream that accepts any text in any locale."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return Stream(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _c_flush() -> Callable[[], Any]:
    """Make C's stdout write whole lines at once; return a function that flushes it."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stdout, None, 1, 0)  # _IOLBF
    except (ImportError, AttributeError, OSError, ValueError):  # no ctypes, or a libc without that name
        return lambda: None
    return lambda: libc.fflush(stdout)


def _pass_over(number: int, frame: types.FrameType | None) -> None:
    """Ignore an interrupt that comes when no cell runs."""


def _no_input(prompt: object = "", **_: object) -> str:
    raise EOFError(f"input({prompt!r}) gets no answer here; put the value into the code")


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib may not be imported
    except OSError:  # it was removed
        return ""


def _only_names(text: str) -> bool:
    """Return whether a text is no more than `<package.Class object>`."""
    return not text or (text.startswith("<") and text.endswith(">") and " object" in text and "\n" not in text)


def best_text(bundle: dict[str, Any]) -> str:
    """Return the most informative text of an object's forms, given by their kind."""
    text = str(bundle.get("text/plain") or "")
    if not bundle.get("image/png") and _only_names(text):
        for kind in RICH:
            content = bundle.get(kind)
            if content:
                if kind == "text/html":
                    return _html_text(str(content))
                return content if isinstance(content, str) else json.dumps(content, default=repr)
    return text


def png_bytes(image: bytes | str) -> bytes:
    """Return an image that may be in base 64."""
    if isinstance(image, str):
        import base64

        return base64.b64decode(image)
    return image


def _html_text(content: str) -> str:
    for pattern, instead in HTML:
        content = re.sub(pattern, instead, content)
    return html.unescape(content).strip()


def main(control: int, *, need_ipython: bool) -> None:
    import faulthandler

    faulthandler.enable(2, all_threads=False)
    Driver(control).serve(need_ipython=need_ipython)
