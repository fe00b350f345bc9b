"""How each program takes a run: `SINKS`.

    sink = SINKS["tensorboard"](run_dir, settings, identity, step)
    sink.scalars(step, {name: number})
    sink.picture(step, path)              of a PNG
    sink.close(finished)

settings: {name: value of JSON}; identity: a text that no other run has; step: that the run
continues from, 0 for a new one. Where `rewinds`, steps after `step` that an earlier process has
written are taken back; elsewhere the caller leaves out what has been written.
"""

import os
import pathlib
import time

from PIL import Image

PROJECT = "numdiff"


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs` shows the runs by name."""

    rewinds = True

    def __init__(self, run_dir, settings, identity, step):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir), flush_secs=10)
        # TensorBoard discards what it has read of this step and later ones
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        known = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()}
        self._add(0, hparams_pb(known, trial_id=identity))

    def _add(self, step, summary):
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def scalars(self, step, values):
        entries = [self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._add(step, self._summary(value=entries))

    def picture(self, step, path):
        with Image.open(path) as picture:
            image = self._summary.Image(width=picture.width, height=picture.height)
        image.encoded_image_string = pathlib.Path(path).read_bytes()
        self._add(step, self._summary(value=[self._summary.Value(tag="samples", image=image)]))
        self._writer.flush()

    def close(self, finished):
        self._writer.close()


class Trackio:
    """A run of Trackio's project `numdiff`: `trackio show --project numdiff` shows it."""

    rewinds = False

    def __init__(self, run_dir, settings, identity, step):
        import trackio

        self._image = trackio.Image
        self._run = trackio.init(
            project=PROJECT,
            name=f"{run_dir.name}-{identity}",
            config={"run_dir": str(run_dir), **settings},
            resume="allow",
            embed=False,
        )

    def scalars(self, step, values):
        self._run.log(values, step=step)

    def picture(self, step, path):
        self._run.log({"samples": self._image(str(path))}, step=step)

    def close(self, finished):
        self._run.finish()


class Wandb:
    """A run of Weights & Biases' project `numdiff`; its variables (WANDB_MODE, WANDB_PROJECT, …) say
    otherwise, and where it goes."""

    rewinds = False

    def __init__(self, run_dir, settings, identity, step):
        import wandb

        self._image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            id=identity,
            dir=str(run_dir),
            config=settings,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )

    def scalars(self, step, values):
        self._run.log(values, step=step)

    def picture(self, step, path):
        self._run.log({"samples": self._image(str(path))}, step=step)

    def close(self, finished):
        self._run.finish(exit_code=0 if finished else 1)


SINKS = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}
