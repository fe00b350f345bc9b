"""Several processes save kernels in one folder: each finds its own again."""
import multiprocessing

from numba.cuda.core.caching import IndexDataCacheFile

from numdiff.device import kernel_cache
from numdiff.device.kernel_cache import save_in_turn, turn

PROCESSES, KERNELS = 4, 12


def kept(folder):
    return IndexDataCacheFile(str(folder), "kernels", "stamp")


def save_kernels(folder, process, start):
    save_in_turn()
    start.wait()
    for n in range(KERNELS):
        kept(folder).save((process, n), f"kernel {process}, {n}")


def test_processes_take_turns(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(PROCESSES)
    processes = [context.Process(target=save_kernels, args=(tmp_path, n, start)) for n in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for process in range(PROCESSES):
        for n in range(KERNELS):
            assert kept(tmp_path).load((process, n)) == f"kernel {process}, {n}"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(kernel_cache.fcntl, "flock", flock)
    with turn(tmp_path):
        (tmp_path / "kernel").write_text("kept")
