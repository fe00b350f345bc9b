"""The public names: what the packages below list in __all__, with arguments, methods and
properties.

    python -m tests.public_names        writes public_names.txt: at a release, whose names it keeps

One line a name: `numdiff.sample(model, count, …)`, `numdiff.nn.UNet.predict(x, t, …)`,
`numdiff.data.Dataset.shape`. test_public.py compares the list with the code: what is gone needs a
line in CHANGELOG.md.
"""

import importlib
import inspect
import pathlib
import re

FILE = pathlib.Path(__file__).with_suffix(".txt")
MODULES = (
    "numdiff",
    "numdiff.data",
    "numdiff.device",
    "numdiff.diffusion",
    "numdiff.emulator",
    "numdiff.evaluation",
    "numdiff.kernels",
    "numdiff.nn",
    "numdiff.nn.functional",
    "numdiff.training",
)


def signature(name, function):
    try:
        names = [
            p.name for p in inspect.signature(function).parameters.values() if p.name != "self"
        ]
    except (TypeError, ValueError):
        return name
    return f"{name}({', '.join(names)})"


def lines_of(name, value):
    """The lines of a public name."""
    if not inspect.isclass(value):
        yield signature(name, value) if inspect.isroutine(value) else name
        return
    yield signature(name, value)
    for base in reversed([c for c in value.__mro__ if c.__module__.startswith("numdiff")]):
        for part, member in vars(base).items():
            if not part.startswith("_"):
                routine = getattr(member, "__func__", member)
                yield (signature if inspect.isfunction(routine) else lambda key, _: key)(
                    f"{name}.{part}", routine
                )


def public_names():
    """[line], sorted."""
    found = set()
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            found.update(lines_of(f"{module}.{name}", getattr(loaded, name)))
    return sorted(found)


def parts(lines):
    """The names that lines stand for, and each argument as `name(argument=)`."""
    for line in lines:
        name, _, arguments = line.rstrip(")").partition("(")
        yield name
        for argument in filter(None, arguments.split(", ")):
            yield f"{name}({argument}=)"


def unexplained(before, now, changelog):
    """Names of the lines `before` that `now` lacks and that no `…` of the changelog is:
    `Denoiser(watch=)`, in full or from any of its dots on."""
    mentioned = set(re.findall(r"`([^`\n]+)`", changelog))
    gone = sorted(set(parts(before)) - set(parts(now)))
    words = {name: name.partition("(")[0].split(".") for name in gone}
    return [
        name
        for name in gone
        if not mentioned
        & {
            ".".join(words[name][i:]) + name[len(".".join(words[name])) :]
            for i in range(len(words[name]))
        }
        and not any(name.startswith((f"{other}(", f"{other}.")) for other in gone if other != name)
    ]


if __name__ == "__main__":
    FILE.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
