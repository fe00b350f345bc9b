"""Command-line options from the table of settings in numdiff/training/options.py: names, units, ranges, defaults."""
import click

from numdiff.training.options import DEFAULT_PRESET, FIELDS, PRESETS, flag, settings_of

ALIASES = {"image_size": "--size", "learning_rate": "--lr"}
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
            if record and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "heading", "Other"), []).append(record)
        widest = max(len(name) for rows in groups.values() for name, _ in rows if len(name) <= WIDEST)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=WIDEST)


def settings(*names, model):
    """Decorator: an option for each of the named settings (default: all of the model's). What the user left out is
    None."""
    def decorate(command):
        for name in reversed(names or settings_of(model)):
            command = click.option(*_declaration(name), name, cls=Setting, **_attributes(name, model))(command)
        return command
    return decorate


def _declaration(name):
    yes = flag(name)
    if name in ALIASES:
        return [ALIASES[name], yes]
    return [f"{yes}/--no-{yes[2:]}" if FIELDS[name].metadata["kind"] is bool else yes]


def _attributes(name, model):
    spec = FIELDS[name].metadata
    kind, common = spec["kind"], {"heading": spec["group"], "default": None, "help": _help(name, spec, model)}
    if name == "preset":
        return {**common, "type": click.Choice(tuple(PRESETS[model]))}
    if kind is bool:
        return common
    if spec["choices"]:
        return {**common, "type": click.Choice(spec["choices"]), "metavar": spec["unit"] or None}
    if isinstance(kind, tuple):
        return {**common, "type": ListOf(kind[0]), "metavar": spec["unit"]}
    if kind is str:
        return {**common, "type": str, "metavar": spec["unit"]}
    limits = {"min": spec["low"] if spec["above"] is None else spec["above"], "min_open": spec["above"] is not None,
              "max": spec["high"] if spec["below"] is None else spec["below"], "max_open": spec["below"] is not None}
    return {**common, "type": (click.IntRange if kind is int else click.FloatRange)(**limits), "metavar": spec["unit"]}


def _help(name, spec, model):
    """The help text with the default, or with what each preset says where they differ."""
    if name == "preset":
        return f"{spec['help']}  [default: {{cuda}} where there is a GPU, else {{cpu}}]".format(**DEFAULT_PRESET[model])
    values = [(preset, values.get(name, FIELDS[name].default)) for preset, values in PRESETS[model].items()]
    if any(value != values[0][1] for _, value in values):
        return f"{spec['help']}  [{'; '.join(f'{preset}: {text(value)}' for preset, value in values)}]"
    return spec["help"] + ("" if values[0][1] is None else f"  [default: {text(values[0][1])}]")


def text(value):
    """A value as one writes it on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
