"""Kernels are compiled in other processes: all of them, whatever happens to one, and nothing is
left behind."""

import pathlib
import signal
import subprocess
import threading
import time

import pytest

from numdiff.device import compile_ahead as module
from numdiff.device.compile_ahead import (
    CompileAhead,
    available_memory,
    expected_seconds,
    worker_count,
)
from numdiff.device.half import find_kernel
from numdiff.device.kernel_cache import KernelCache, Key, MachineCode
from tests.conftest import needs
from tests.forked import forked

SILU = Key("numdiff.kernels.elementwise", "silu_forward_kernel_v2", ("float32[1]", "float32[1]"))
BROKEN = Key("numdiff.kernels.elementwise", "silu_forward_kernel_v2", ("float32[1]",))
KEYS = [Key("numdiff.kernels.reduce", f"kernel{n}", ("float32[1]",)) for n in range(6)]

# What a process of these tests does in place of numdiff's: a kernel's name says what happens to it
STAND_IN = """
import importlib.util, json, os, pathlib, signal, sys, time
where = os.path.join(sys.modules["numdiff"].__path__[0], "device", "kernel_cache.py")
spec = importlib.util.spec_from_file_location("numdiff.device.kernel_cache", where)  # without all of numdiff.device
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
KernelCache, Key, MachineCode = module.KernelCache, module.Key, module.MachineCode
folder = pathlib.Path(sys.argv[1])
cache = KernelCache(json.loads(sys.argv[2]), folder)
for line in sys.stdin:
    module, name, types = json.loads(line)
    with open(folder / "begun", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
    if name == "fatal" or name == "unlucky" and (folder / "begun").read_text().count("unlucky") == 1:
        (folder / f".{name}.{os.getpid()}").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "stopped" and (folder / "begun").read_text().count("stopped") == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "endless":
        (folder / f".{name}.{os.getpid()}").write_text("half")
        time.sleep(600)
    cache.write(Key(module, name, tuple(types)), MachineCode("entry", name.encode()))
    print(json.dumps({"fault": "TypeError: no"} if name == "broken" else {"seconds": 1.0}), flush=True)
"""


@pytest.fixture
def cache(tmp_path):
    return KernelCache((9, 0), tmp_path / "kernels")


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(module, "START", STAND_IN)


def named(name):
    return KEYS[0]._replace(name=name)


def begun(cache):
    """[(kernel, process)] in the order in which they were begun."""
    return [
        (name, int(process))
        for name, process in map(str.split, (cache.folder / "begun").read_text().splitlines())
    ]


def alive(process):
    """Whether a process runs: one that has ended may wait to be reaped."""
    try:
        return (
            pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def test_a_kernel_is_compiled_by_another_process(cache):
    """The real one: what it makes is what this process would; a kernel that cannot be compiled does
    not stop it."""
    left = []
    faults = CompileAhead([BROKEN, SILU], cache, workers=1).finish(left.append)
    assert (
        left == [1, 0]
        and list(faults) == [BROKEN]
        and "TypeError: Signature mismatch" in faults[BROKEN]
    )
    code = cache.read(SILU)
    assert (
        find_kernel(SILU).py_func.__name__ in code.entry
        and code.cubin.startswith(b"\x7fELF")
        and code.seconds > 0
    )
    again = CompileAhead([SILU], cache)
    assert again.wanted == [] and again.workers == 0 and again.finish() == {}


def test_all_are_compiled_side_by_side(cache, stand_in):
    left = []
    compilation = CompileAhead([*KEYS, KEYS[0]], cache, workers=3)
    assert compilation.finish(left.append) == {} and left == [5, 4, 3, 2, 1, 0]
    assert all(cache.read(key).cubin == key.name.encode() for key in KEYS)
    assert sorted(name for name, _ in begun(cache)) == [key.name for key in KEYS]
    assert not any(alive(process) for _, process in begun(cache))


def test_a_damaged_file_is_compiled_again(cache, stand_in):
    CompileAhead(KEYS[:2], cache, workers=1).finish()
    (cache.folder / cache.file_name(KEYS[0])).write_bytes(b"half")
    compilation = CompileAhead(KEYS[:2], cache, workers=1)
    assert compilation.wanted == KEYS[:1] and compilation.finish() == {} and cache.has(KEYS[0])


def test_the_slowest_first():
    keys = [
        SILU,
        *(
            SILU._replace(module=f"numdiff.kernels.conv2d.{name}")
            for name in ("hopper", "launcher")
        ),
    ]
    assert sorted(keys, key=expected_seconds, reverse=True) == [keys[1], keys[2], keys[0]]


def test_a_killed_process(cache, stand_in):
    """The rest continues; the kernel is tried once more, and given up after that."""
    faults = CompileAhead(
        [named("fatal"), named("unlucky"), named("broken"), *KEYS], cache, workers=2
    ).finish()
    assert faults == {
        named("fatal"): "its process was killed by signal 9, 2 times",
        named("broken"): "TypeError: no",
    }
    assert all(cache.has(key) for key in [*KEYS, named("unlucky")])
    assert [name for name, _ in begun(cache)].count("fatal") == 2
    assert not list(cache.folder.glob(".*"))


@needs("proc")
def test_a_stopped_process(cache, stand_in):
    """It is killed, and another compiles its kernel."""
    assert CompileAhead([named("stopped")], cache, workers=1).finish(every=0.1) == {}
    assert cache.has(named("stopped")) and [name for name, _ in begun(cache)] == ["stopped"] * 2


def test_no_process_can_be_started(cache, monkeypatch):
    monkeypatch.setattr("numdiff.children.sys.executable", "/nowhere/python")
    assert CompileAhead(KEYS[:1], cache).finish() == {
        KEYS[0]: "its process was ended: none could be started, 2 times"
    }


def test_ctrl_c_ends_it_at_once(cache, stand_in):
    """The processes are gone, and nothing is half-written; what was compiled before is kept."""

    def interrupt(left):
        if left == 2:
            raise KeyboardInterrupt

    keys, started = (
        [KEYS[0], named("endless"), named("endless")._replace(types=())],
        time.perf_counter(),
    )
    with pytest.raises(KeyboardInterrupt):
        CompileAhead(keys, cache, workers=3).finish(interrupt)
    assert time.perf_counter() - started < 100  # the two would take ten minutes
    assert not any(alive(process) for _, process in begun(cache))
    assert not list(cache.folder.glob(".*")) and cache.has(KEYS[0])


def test_processes_end_with_who_started_them(tmp_path):
    """…also with one that is killed, in the middle of their work."""
    code = f"""
import os, signal, sys
from numdiff.device.compile_ahead import CompileAhead
from numdiff.device.kernel_cache import KernelCache, Key
compilation = CompileAhead([Key(*{[*SILU[:2]]!r}, ("float32[1]", "float32[1]"))], KernelCache((9, 0), sys.argv[1]), 1)
while not compilation._processes:
    pass
process, = compilation._processes
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    out = subprocess.run(forked("-c", code, tmp_path), capture_output=True, text=True)
    assert out.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while alive(int(out.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(int(out.stdout))


def test_an_unwritable_cache(tmp_path, stand_in):
    (tmp_path / "file").write_text("")
    cache, lines = KernelCache((9, 0), tmp_path / "file" / "kernels"), []
    assert CompileAhead(KEYS, cache, workers=2, complain=lines.append).finish() == {}
    assert all(cache.read(key) for key in KEYS) and len(lines) == 1


def test_two_processes_at_once(cache, stand_in):
    """Both have all kernels at the end, whichever process compiled them."""
    both = [CompileAhead(KEYS, cache, workers=2) for _ in range(2)]
    threads = [threading.Thread(target=compilation.finish) for compilation in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cache.read(key) == MachineCode("entry", key.name.encode()) for key in KEYS)
    assert [compilation.faults for compilation in both] == [{}, {}]


def test_as_many_processes_as_there_is_room_for(monkeypatch):
    assert available_memory() > 1 << 28
    monkeypatch.setattr(module, "available_memory", lambda: 5 << 30)
    assert [
        worker_count(84, range(16)),
        worker_count(3, range(16)),
        worker_count(84, range(2)),
    ] == [5, 3, 2]
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
    assert worker_count(84, range(16)) == 1
    monkeypatch.setattr(module, "available_memory", lambda: None)
    assert worker_count(84, range(16)) == 16
