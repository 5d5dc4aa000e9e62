"""How vLLM's processes begin and end, with plain Python processes in their place."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.inference.vllm import vllm_processes
from prorl_zmq.inference.vllm.vllm_processes import (
    HOST_VARIABLE,
    Interrupted,
    bind_to_cores,
    interruptible,
    set_environment,
)
from prorl_zmq.system.processes import ISOLATED

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 30.0

# A host whose thread, not itself, starts a process, as vLLM's may; it prints that one's pid, and waits.
HOST = """
import os, subprocess, sys, threading
def start():
    code = "import sys, time; from prorl_zmq.inference.vllm.vllm_processes import end_with_host; end_with_host(); "
    code += "print('ready', flush=True); time.sleep(600)"
    global child
    child = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\\n"
os.environ[HOST_VARIABLE] = str(os.getpid())
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(child.pid, child.poll(), flush=True)
sys.stdin.read()
"""


def test_process_ends_with_its_host_however_that_ends() -> None:
    code = HOST.replace("HOST_VARIABLE", repr(HOST_VARIABLE))
    host = subprocess.Popen(
        [sys.executable, *ISOLATED, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with host:
        pid, ended = host.stdout.readline().split()  # type: ignore[union-attr]
        assert ended == "None", "it ended with the thread that started it"
        child = os.pidfd_open(int(pid))
        host.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], LIMIT_S)[0]
    os.close(child)


def test_process_whose_host_is_gone_does_not_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "from prorl_zmq.inference.vllm.vllm_processes import end_with_host; end_with_host(); print('lives')"
    done = subprocess.run(
        [sys.executable, *ISOLATED, "-c", code],
        env=os.environ | {HOST_VARIABLE: str(gone.pid)},
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_without_a_host_nothing_is_done() -> None:
    code = "import threading; from prorl_zmq.inference.vllm.vllm_processes import end_with_host; end_with_host(); "
    code += "print(threading.active_count())"
    for host in ("", "0"):
        environment = {name: value for name, value in os.environ.items() if name != HOST_VARIABLE}
        done = subprocess.run(
            [sys.executable, *ISOLATED, "-c", code],
            env=environment | ({HOST_VARIABLE: host} if host else {}),
            capture_output=True,
            timeout=LIMIT_S,
        )
        assert (done.returncode, done.stdout.strip()) == (0, b"1"), done.stderr


# The last words of a process that it starts, the whole passed on; then its own output is its own again.
TAILED = """
import subprocess, sys
from prorl_zmq.inference.vllm.vllm_processes import TAIL_LINES, tailed_output
with tailed_output() as tail:
    print("own words")
    code = f"import sys; [print('line', n) for n in range({TAIL_LINES + 8})]; sys.exit('the reason')"
    subprocess.run([sys.executable, "-c", code])
words = tail.text(20)
print("afterwards", "own words" in words, "line 31" in words, words.endswith("the reason"), len(words.splitlines()))
"""


def test_last_words_of_a_process() -> None:
    done = subprocess.run(
        [sys.executable, *ISOLATED, "-c", TAILED], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == f"afterwards False True True {vllm_processes.TAIL_LINES}\n"
    assert done.stderr.startswith("own words\nline 0\n")
    assert done.stderr.endswith(f"line {vllm_processes.TAIL_LINES + 7}\nthe reason\n")


def test_signal_interrupts_a_start() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_environment_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "TORCHDYNAMO_DISABLE", HOST_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        set_environment(offline=True)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert os.environ[HOST_VARIABLE] == str(os.getpid())


def test_hub_is_asked_where_the_model_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        set_environment(offline=False)
        assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [([1], 1, "1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([4, 5, 6], 2, "4|5,6"), ([0], 2, None)],
)
def test_cores(cores: list[int], ranks: int, bound: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    bind_to_cores(cores, ranks)
    assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == bound
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_OMP_THREADS_BIND": "7"})
    bind_to_cores(cores, ranks)
    assert os.environ == {"VLLM_CPU_OMP_THREADS_BIND": "7"}
