"""Stars and tries of a learner, in a JSON file of the user's cache folder."""

import contextlib
import json
import pathlib

from .. import caches


def path():
    return pathlib.Path(caches.cache_root()) / "learn" / "progress.json"


def load():
    """{number: {"stars": 0 to 3, "tries": count}}; empty where there is no readable file."""
    try:
        found = json.loads(caches.read_own(path()))
        return {
            int(number): {
                "stars": min(3, max(0, int(entry["stars"]))),
                "tries": max(0, int(entry["tries"])),
            }
            for number, entry in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def record(number, stars):
    """Count a try of a puzzle, and keep the most stars; returns its entry. A folder that cannot be
    written changes nothing else."""
    known = load()
    entry = known.setdefault(number, {"stars": 0, "tries": 0})
    entry["stars"], entry["tries"] = max(entry["stars"], stars), entry["tries"] + 1
    with contextlib.suppress(OSError):
        caches.own_folder(path().parent)
        caches.write_own(path(), json.dumps({str(n): e for n, e in sorted(known.items())}).encode())
    return entry
