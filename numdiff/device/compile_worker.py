"""A process that compiles kernels for another one, as compile_ahead.py starts it.

It reads lines of JSON, [module, name, [types]], and answers each with a line, {"seconds": …} once
the kernel is in the cache's folder, else {"fault": …}. It ends, whatever it is doing, when its
input does: when the process that started it is gone.
"""

import contextlib
import json
import os
import pathlib
import queue
import sys
import threading


def read_lines(lines):
    """Pass on what arrives; end the process when the input ends."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def main(folder, capability, cores):
    """folder: of the cache; capability, cores (to run on; none: all): lists, as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    lines = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    cores = json.loads(cores)
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # the job may be confined to some cores: then to those
            os.sched_setaffinity(0, cores)
    from .compiler import compile_kernel
    from .half import find_kernel
    from .kernel_cache import KernelCache, Key

    cache = KernelCache(json.loads(capability), pathlib.Path(folder))
    while True:
        module, name, types = json.loads(lines.get())
        key = Key(module, name, tuple(types))
        try:
            code = compile_kernel(find_kernel(key), key.types, cache.capability)
            cache.write(key, code)
            answer = {"seconds": code.seconds}
        except Exception as fault:  # this kernel's, not the next one's
            answer = {"fault": " ".join(f"{type(fault).__name__}: {fault}".split())[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
