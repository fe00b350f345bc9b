"""The losses of several runs in one picture, each the mean of the steps between two log lines.

python -m tests.training.plot_losses losses.png runs/00000-dit-small64 runs/00001-dit-small64
"""

import argparse
import json
import pathlib

import numpy as np

from numdiff.benchmark import plots


def losses_of(folder):
    """(steps, mean losses) of a run's stats.jsonl."""
    rows = [
        json.loads(line) for line in (pathlib.Path(folder) / "stats.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if row.get("losses")]
    return [row["step"] for row in rows], [float(np.mean(row["losses"])) for row in rows]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--names", nargs="+", help="instead of the folders'")
    options = parser.parse_args(arguments)
    names = options.names or [pathlib.Path(run).name for run in options.runs]
    series = {name: losses_of(run) for name, run in zip(names, options.runs, strict=True)}
    plots.curves(options.picture, series, "step", "loss", "Training loss", log_y=True)
    for name, (_, losses) in series.items():
        tail = losses[-max(1, len(losses) // 10) :]
        print(f"{name}: loss {losses[0]:.4f} → {np.mean(tail):.4f} (the last tenth)")


if __name__ == "__main__":
    main()
