"""Processes that begin with numdiff imported, which takes a separate process more than a second:
forks of one server.

`forked(…)` is a command like `[sys.executable, …]`, with `-c CODE` or `-m MODULE`. What it starts,
mpiexec for one, has a client of 20 ms: it hands its arguments, environment, folder and open files
to the server, whose fork runs in its place; signals go to the fork, its end is the client's, and it
dies with the client. The fork's process number is another one, it finds no GPU, as CUDA does not
survive a fork, and the order of sets of strings is that of its brothers: so of each kind of job one
begins as users' do, and all that are for GPUs.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
IMPORTED = (
    "mpi4py",
    "numdiff_cli.main",
    "numdiff_cli.train",
    "numdiff_cli.sample",
    "numdiff.training.run",
    "numdiff.training.sampling",
    "tests.training.test_fp8",
)
MOST = 64  # files that a process hands on
_server = []  # once there is one: its socket, its process, the socket's folder


def forked(*arguments):
    """The command of a fork, which runs these arguments of Python's; starts the server if there is
    none yet. Elsewhere than on Linux, where a fork may not be safe, a separate process."""
    if sys.platform != "linux":
        return [sys.executable, *map(str, arguments)]
    return [sys.executable, "-IS", __file__, "client", address(), *map(str, arguments)]


def address():
    """The server's socket. It ends with this process, which has the other end of its input."""
    if not _server:
        import atexit
        import pathlib
        import subprocess
        import tempfile

        folder = tempfile.TemporaryDirectory(prefix="numdiff-forked-")
        atexit.register(folder.cleanup)
        root = pathlib.Path(__file__).resolve().parents[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", "server", f"{folder.name}/socket"],
            cwd=root,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"ready\n"
        _server[:] = f"{folder.name}/socket", process, folder
    return _server[0]


def client(path, *arguments):
    """Stands for the process that it lets the server fork."""
    files = [number for number in range(MOST) if number < 3 or inherits(number)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    request = json.dumps(
        {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
        }
    ).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "little")], files)
    server.sendall(request)
    process = answer(server)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    for number in range(3):  # a pipe that the fork closes is closed
        os.close(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = answer(server)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in FORWARDED:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def answer(server):
    """The number that the server sends; where it is gone, this process ends, too."""
    return int.from_bytes(server.recv(4) or os._exit(1), "little")


def inherits(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def server(path):
    """Forks on each request, until its input ends; what is forked returns (arguments of Python's)."""
    import gc
    import importlib

    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # mpi4py may be missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    signal.set_wakeup_fd(wakes)
    print("ready", flush=True)
    clients = {}  # {process: the connection to its client}
    while True:
        ready, _, _ = select.select([0, listener, woken, *clients.values()], [], [])
        if 0 in ready:
            for process in clients:
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        if woken in ready:
            os.read(woken, 1000)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection = clients.pop(ended[0])
                    with contextlib.suppress(OSError):  # it may be gone
                        connection.sendall(ended[1].to_bytes(4, "little"))
                    connection.close()
        for process, connection in clients.items():
            if connection in ready:
                os.kill(process, signal.SIGKILL)  # its client is gone
        if listener in ready:
            connection, _ = listener.accept()
            length, files, _, _ = socket.recv_fds(connection, 4, MOST)
            request = connection.recv(int.from_bytes(length, "little") or 1, socket.MSG_WAITALL)
            if not request:  # it is gone already
                connection.close()
                continue
            request = json.loads(request)
            process = os.fork()
            if not process:
                for other in (listener, connection, *clients.values()):
                    other.close()
                become(request, files, (woken, wakes))
                return request["arguments"]
            clients[process] = connection
            with contextlib.suppress(OSError):
                connection.sendall(process.to_bytes(4, "little"))
            for number in files:
                os.close(number)


def become(request, files, closed):
    """Take the place of the process that asked: its files under their numbers, its environment and
    folder."""
    import fcntl

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in closed:
        os.close(number)
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 2 * MOST) for number in files]
    for number in files:
        os.close(number)
    for number, source in zip(request["files"], above, strict=True):
        os.dup2(source, number)
        os.close(source)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(
            number, mode, encoding="utf-8", errors="backslashreplace" if number == 2 else "strict"
        )
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def run(how, what, *arguments):
    """python -c CODE … or python -m MODULE …"""
    sys.argv = ["-c" if how == "-c" else what, *arguments]
    if how == "-c":
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        import runpy

        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(*sys.argv[2:])
    else:
        run(*server(sys.argv[2]))
