"""The setting of a run that is measured in the features of a network."""

from ...setting import setting


class FeatureSettings:
    heading = "Output"
    evaluate_features: str | None = setting(
        None,
        "Features of the measurements of --evaluate-every, as --features of `numdiff evaluate`: a file that `numdiff "
        "convert` wrote, such as inception.h5 for FID.  [default: numdiff's own]",
        unit="FILE",
        resume=True,
        needs=("evaluate_every", None),
    )
