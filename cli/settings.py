"""Command-line options from the table of settings in numdiff/training/options.py: names, units, ranges, presets, groups."""
import click
from numdiff.training.options import FIELDS, PRESETS, flag

WIDEST = 30  # characters of the column of option names, so that the groups line up


class ListOf(click.ParamType):
    """Values with commas between them; "none" is the empty list."""

    name = "list"

    def __init__(self, kind):
        self.kind = kind

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        if value.strip().lower() in ("", "none"):
            return ()
        try:
            return tuple(self.kind(v.strip()) for v in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers with commas between them.", param, ctx)


class Setting(click.Option):
    """An option that knows the heading under which help shows it."""

    def __init__(self, *args, heading="Options", **kwargs):
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings."""

    def format_options(self, ctx, formatter):
        groups = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record:
                groups.setdefault(getattr(parameter, "heading", "Other"), []).append(record)
        widest = max(len(name) for rows in groups.values() for name, _ in rows if len(name) <= WIDEST)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=WIDEST)


def settings(*names):
    """Decorator: an option for each of the named settings (default: all). What the user left out is None."""
    def decorate(command):
        for name in reversed(names or FIELDS):
            command = click.option(*_declaration(name), name, cls=Setting, **_attributes(name))(command)
        return command
    return decorate


def _declaration(name):
    yes = flag(name)
    return [f"{yes}/--no-{yes[2:]}" if FIELDS[name].metadata["kind"] is bool else yes]


def _attributes(name):
    spec = FIELDS[name].metadata
    kind, common = spec["kind"], {"heading": spec["group"], "default": None, "help": _help(name, spec)}
    if kind is bool:
        return common
    if spec["choices"]:
        return {**common, "type": click.Choice(spec["choices"])}
    if isinstance(kind, tuple):
        return {**common, "type": ListOf(kind[0]), "metavar": spec["unit"]}
    if kind is str:
        return {**common, "type": str, "metavar": spec["unit"]}
    limits = {"min": spec["low"] if spec["above"] is None else spec["above"], "min_open": spec["above"] is not None,
              "max": spec["high"] if spec["below"] is None else spec["below"], "max_open": spec["below"] is not None}
    return {**common, "type": (click.IntRange if kind is int else click.FloatRange)(**limits), "metavar": spec["unit"]}


def _help(name, spec):
    """The help text, with the range and the default, or what the presets say where they differ."""
    notes = []
    values = {preset: PRESETS[preset].get(name, FIELDS[name].default) for preset in PRESETS}
    if len(set(values.values())) > 1:
        notes.append(", ".join(f"{preset}: {_text(value)}" for preset, value in values.items()))
    elif (default := next(iter(values.values()))) is not None:
        notes.append(f"default: {_text(default)}")
    span = _range(spec)
    if span:
        notes.append(span)
    return spec["help"] + (f"  [{'; '.join(notes)}]" if notes else "")


def _range(spec):
    low, above, high, below = (spec[key] for key in ("low", "above", "high", "below"))
    left = f"{low} ≤ " if low is not None else f"{above} < " if above is not None else ""
    right = f" ≤ {high}" if high is not None else f" < {below}" if below is not None else ""
    if left and not right:
        return f"≥ {low}" if low is not None else f"> {above}"
    return f"{left}x{right}" if right else ""


def _text(value):
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
