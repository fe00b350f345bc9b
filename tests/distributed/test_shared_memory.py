"""What killed jobs leave in memory: removed, unless in use."""

import mmap
import os

from numdiff.distributed.shared_memory import remove_stray_memory
from tests.conftest import needs

pytestmark = needs("proc")


def test_only_unused_segments_are_removed(tmp_path):
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "mpich_shm_new_0", "other_shm_0"):
        (tmp_path / name).write_bytes(bytes(4096))
        if "new" not in name:
            os.utime(tmp_path / name, (1, 1))
    (tmp_path / "mpich_shm_link_0").symlink_to(tmp_path / "other_shm_0")
    with open(tmp_path / "mpich_shm_alive_0", "r+b") as file, mmap.mmap(file.fileno(), 4096):
        os.utime(tmp_path / "mpich_shm_alive_0", (1, 1))
        assert remove_stray_memory([tmp_path, tmp_path / "nowhere"]) == [
            tmp_path / "mpich_shm_dead_0"
        ]
    assert remove_stray_memory([tmp_path]) == [tmp_path / "mpich_shm_alive_0"]
    assert sorted(os.listdir(tmp_path)) == ["mpich_shm_link_0", "mpich_shm_new_0", "other_shm_0"]
