"""`--versus torch`: its options, and what of PyTorch is measured beside numdiff."""

from ..settings import ListOf
from ..values import Choice

VERSUS = (
    ("--versus", {"type": Choice(["torch"]), "help": "Also measure PyTorch with the same model, in turns with "
                  "numdiff."}),
    ("--modes", {"metavar": "MODE,…", "type": ListOf(str), "help": "PyTorch's modes: eager, compile, graphs (compiled, "
                 "with CUDA graphs), or all. Compiling takes about a minute.  [default: eager,graphs; on the CPU "
                 "eager,compile]"}),
    ("--torch-precision", {"metavar": "NAME,…", "type": ListOf(str), "help": "PyTorch's arithmetic: fp32 (strict), "
                           "tf32, bf16, fp16, or all.  [default: the counterpart of --precision; bf16 for fp16]"}))


def measured(result):
    return sum("ms" in row for row in result["versus"])


def torch_pairs(options, versus, modes, torch_precision):
    """The (mode, precision) pairs of PyTorch to measure; a `UsageError` for one that does not exist."""
    from numdiff.benchmark.step import BEST_MODES, COMPARED
    from numdiff.benchmark.torch_step import MODES, PRECISIONS, require_torch, require_twin
    from numdiff.errors import UsageError
    if not versus:
        if modes or torch_precision:
            raise UsageError(f"{'--modes' if modes else '--torch-precision'} needs --versus torch; add it, or leave it "
                             "out.")
        return []
    if options.optimizer != "adamw":
        raise UsageError(f"--optimizer {options.optimizer} has no counterpart in --versus torch, whose step is "
                         "AdamW's: leave one of them out.")
    for option, names, known in (("--modes", modes, MODES), ("--torch-precision", torch_precision, PRECISIONS)):
        for name in names or ():
            if name not in known and names != ("all",):
                raise UsageError(f"{option} {name} does not exist; use some of {', '.join(known)}, or all.")
    require_twin(options)
    require_torch()
    device = "cuda" if options.device == "cuda" else "cpu"
    if modes == ("all",):
        modes = [mode for mode in MODES if device == "cuda" or mode != "graphs"]
    if torch_precision == ("all",):
        torch_precision = PRECISIONS
    modes = modes or BEST_MODES[device]
    precisions = torch_precision or (COMPARED[options.precision] if device == "cuda" else ("fp32",))
    return [(mode, precision) for precision in precisions for mode in modes]
