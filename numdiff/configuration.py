"""Typed configurations: a frozen dataclass with an object's settings, which its constructor takes
as `config` or by name.

    @configured_by(TrainerConfig)
    class Trainer:
        def __init__(self, model, dataset, config: TrainerConfig | None = None, **settings): ...

    Trainer(model, dataset, TrainerConfig(learning_rate=1e-3))
    Trainer(model, dataset, learning_rate=1e-3)
"""

import dataclasses
import inspect
from typing import Any

from .errors import UsageError, near_miss, shown


def configured_by(config: type):
    """Decorator of a class whose constructor takes `config` and `**settings`: its signature, for
    help and for editors, names the settings, and its docstring has a line of each."""

    def decorate(kind):
        signature = inspect.signature(kind.__init__)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type,
            )
            for field in dataclasses.fields(config)
        ]
        kind.__init__.__signature__ = signature.replace(parameters=[*own, *named])
        text = [
            (kind.__doc__ or "").rstrip(),
            "",
            f"    Settings, in a `{config.__name__}` or by name:",
            *(
                base.__doc__.partition("\n")[2].strip("\n ").join(("    ", ""))
                for base in reversed(config.__mro__)
                if dataclasses.is_dataclass(base)
            ),
        ]
        kind.__doc__ = "\n".join([*text, ""])
        return kind

    return decorate


def given_values(
    kind: type, config: Any, named: dict[str, Any], who: str, full: type | None = None
) -> dict[str, Any]:
    """{setting: value} of what a caller has set: values of `config`, a `kind` or None, that are not
    the default, then those that are `named`, which take precedence.

    who: the object, in a message; full: a subclass of `kind` that has further settings
    """
    if config is not None and not isinstance(config, kind):
        raise UsageError(
            f"{who} takes a {kind.__name__} as config, and not {shown(config)}: give "
            f"{kind.__name__}(…), or the settings by name."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(full or kind)}
    for name in named:
        if name not in defaults:
            raise UsageError(
                f"{who} has no argument {name!r}{near_miss(name, defaults)}: correct it, or leave it "
                "out."
            )
    values = {} if config is None else vars(config)
    return {**{name: v for name, v in values.items() if v is not defaults[name]}, **named}
