from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest

from prorl_zmq.tools.execution import memory_files
from prorl_zmq.tools.execution.memory_files import TooManyDescriptors, memory_files_bytes

SIZE_BYTES = 8 * 2**20
CLONE_FILES = 0x400


def new_file() -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, bytes(SIZE_BYTES))
    return descriptor


def test_a_file_counts_once_however_often_it_is_open() -> None:
    ours = [(os.getpid(), 1)]
    before = memory_files_bytes(ours)
    descriptor = new_file()
    again = os.dup(descriptor)
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory_files_bytes([*ours, (child.pid, 1)]) - before == SIZE_BYTES
        for each in (descriptor, again):
            os.close(each)
        assert memory_files_bytes(ours) == before
        assert memory_files_bytes([*ours, (child.pid, 1)]) - before == SIZE_BYTES
        child.kill()
    assert memory_files_bytes([*ours, (child.pid, 1)]) == before


def test_descriptors_that_only_one_thread_has_are_seen() -> None:
    before = memory_files_bytes([(os.getpid(), 1)])
    made, done = threading.Event(), threading.Event()
    results: list[int] = []

    def hide() -> None:
        results.append(ctypes.CDLL(None).unshare(CLONE_FILES))
        descriptor = new_file()
        made.set()
        done.wait(20)
        os.close(descriptor)

    thread = threading.Thread(target=hide)
    thread.start()
    assert made.wait(20)
    assert results == [0]
    assert memory_files_bytes([(os.getpid(), 1)]) == before
    assert memory_files_bytes([(os.getpid(), 2)]) == before + SIZE_BYTES
    done.set()
    thread.join(20)


def test_threads_that_share_descriptors_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, args=(20,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    monkeypatch.setattr(memory_files, "DESCRIPTORS", 2 * len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    memory_files_bytes([(os.getpid(), 21)])
    monkeypatch.setattr(memory_files, "DESCRIPTORS", 2)
    with pytest.raises(TooManyDescriptors):
        memory_files_bytes([(os.getpid(), 21)])
    done.set()
    for thread in threads:
        thread.join(20)
