"""The setting of a run that other programs show, too."""

from ...setting import setting

NAMES = "tensorboard", "trackio", "wandb"


class LogSettings:
    heading = "Output"
    log: tuple[str, ...] | None = setting(
        None,
        "Also write the curves, the sample grids and the settings for these programs: tensorboard (files in the run "
        "folder), trackio, wandb.",
        unit="NAME,…",
        choices=NAMES,
        resume=True,
    )
