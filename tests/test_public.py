"""The public names: each has an example that runs, hints for type checkers, and one sentence for
what is wrong."""

import inspect
import pathlib
import re
import typing

import numpy as np
import pytest

import numdiff
from numdiff.data import open_dataset
from numdiff.diffusion import SAMPLERS, Diffusion, Sampling, alpha_bars, spaced_timesteps
from numdiff.errors import UsageError
from numdiff.evaluation import RandomConv
from numdiff.nn import AdamW, DiT, Linear, Tape, Tensor, UNet
from numdiff.training import Trainer
from tests import models, public_names
from tests.models import small_unet

PAGE = (pathlib.Path(numdiff.__file__).parent / "README.md").read_text(encoding="utf-8")
T = np.zeros(1, np.int32)


@pytest.mark.parametrize("module", ["numdiff", "numdiff.training", "numdiff.data"])
def test_every_public_name_has_an_example(module):
    """A heading a name, and Python beneath it that uses it; tests/test_readme.py runs them all."""
    for name in __import__(module, fromlist=["__all__"]).__all__:
        (section,) = re.findall(
            rf"^## `{module}\.{name}`.*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
        )
        (example, *_) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        assert re.search(rf"\b{name}\b", example) and section.split("```")[0].strip(), name


def public_functions():
    """{name: function} of the functions, methods and properties behind the public names, and of the
    samplers."""
    found = dict(SAMPLERS)
    for module in (numdiff, numdiff.training, numdiff.data, numdiff.diffusion, numdiff.nn):
        for name in module.__all__:
            value = getattr(module, name)
            members = (
                {name: value}
                if inspect.isfunction(value)
                else {
                    f"{name}.{part}": getattr(member, "__func__", getattr(member, "fget", member))
                    for part, member in vars(value).items()
                    if part == "__init__" or not part.startswith("_")
                }
                if inspect.isclass(value)
                else {}
            )
            found |= {
                f"{module.__name__}.{key}": f for key, f in members.items() if inspect.isfunction(f)
            }
    return found


def test_a_public_name_that_goes_is_in_the_changelog():
    """Names, methods and arguments of the last release, which public_names.txt keeps."""
    changelog = (pathlib.Path(numdiff.__file__).parents[1] / "CHANGELOG.md").read_text(
        encoding="utf-8"
    )
    gone = public_names.unexplained(
        public_names.FILE.read_text(encoding="utf-8").splitlines(),
        public_names.public_names(),
        changelog,
    )
    assert not gone, (
        f"gone: {', '.join(gone)}: keep them, or name each in CHANGELOG.md, under Removed, in backticks"
    )


def test_what_a_changelog_must_name():
    before, now = (
        ["a.b.C(x, watch)", "a.b.C.table", "a.b.f(x)", "a.b.D(y)", "a.b.D.close()"],
        ["a.b.C(x)", "a.b.f(z)"],
    )
    assert public_names.unexplained(before, now, "") == [
        "a.b.C(watch=)",
        "a.b.C.table",
        "a.b.D",
        "a.b.f(x=)",
    ]
    assert public_names.unexplained(before, now, "`C(watch=)`, `b.C.table`, `a.b.D` and f(x=)") == [
        "a.b.f(x=)"
    ]


@pytest.mark.parametrize("name, function", public_functions().items(), ids=public_functions())
def test_type_checkers_see_the_declarations(name, function):
    """The type of every argument, and of every result."""
    signature = inspect.signature(function)
    assert [
        p.name
        for p in signature.parameters.values()
        if p.annotation is p.empty and p.name != "self"
    ] == []
    assert signature.return_annotation is not signature.empty or name.endswith(".__init__")


def test_types_are_there_when_they_are_asked_for():
    assert (pathlib.Path(numdiff.__file__).parent / "py.typed").exists()
    for function in (
        numdiff.load,
        numdiff.sample,
        open_dataset,
        UNet.__init__,
        DiT.forward,
        Sampling.__init__,
        Diffusion.__init__,
        Trainer.run,
        UNet.predict,
        AdamW.update,
        *SAMPLERS.values(),
    ):
        assert typing.get_type_hints(function), function


class ImageList:
    shape, labels, dtype = (4, 8, 8, 3), None, np.dtype(np.uint8)


def called(shape, t):
    return small_unet()(Tensor(np.zeros(shape, np.float32)), t)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            lambda: Trainer(small_unet(), ImageList(), diffusion=7),
            "diffusion must be a dict of steps, .* the int 7",
        ),
        (
            lambda: Trainer(3, ImageList()),
            "a Trainer takes a model, such as a numdiff.nn.UNet, and not the int 3",
        ),
        (
            lambda: Trainer(small_unet(), "a.h5"),
            "a Trainer takes a dataset, .* and not the str 'a.h5'",
        ),
        (
            lambda: Trainer(small_unet(), ImageList(), batch=None),
            "--batch None must be a whole number",
        ),
        (
            lambda: numdiff.load(3),
            "numdiff.load takes the path of a checkpoint, .*, and not the int 3",
        ),
        (lambda: numdiff.load(None), "and not the NoneType None"),
        (
            lambda: numdiff.sample("runs/0"),
            "samples are made from a model, .* and not from the str 'runs/0'",
        ),
        (
            lambda: numdiff.sample(small_unet(), count="4"),
            "count must be a whole number, and not the str '4'",
        ),
        (
            lambda: numdiff.sample(small_unet(), steps=2.5),
            "steps must be a whole number or a respacing .* the float 2.5",
        ),
        (lambda: numdiff.sample(small_unet(), seed=1.5), "seed must be a whole number"),
        (
            lambda: small_unet(image_size="8"),
            "image_size must be a whole number, or height and width, and not the str '8'",
        ),
        (
            lambda: small_unet(channel_mult=2),
            "channel_mult must be a list or tuple, each item a number, and not",
        ),
        (lambda: small_unet(dropout="much"), "dropout must be a number"),
        (
            lambda: small_unet(conv_resample=1),
            "conv_resample must be True or False, and not the int 1",
        ),
        (lambda: DiT(num_classes=2.5), "num_classes must be a whole number or None"),
        (
            lambda: small_unet().predict("x", 1),
            "x_t must be an array of real numbers, and not the str 'x'",
        ),
        (
            lambda: small_unet().predict(np.zeros((1, 8, 8, 3), complex), 1),
            "x_t must be an array of real numbers",
        ),
        (
            lambda: small_unet()(np.zeros((1, 8, 8, 3)), 1),
            "called with a Tensor, and not with a ndarray: write .*predict",
        ),
        (
            lambda: called((1, 3, 8, 8), T),
            r"x has shape \(1, 3, 8, 8\); this model takes \(B, 8, 8, 3\)",
        ),
        (lambda: called((8, 8, 3), T), r"x has shape \(8, 8, 3\)"),
        (
            lambda: called((1, 8, 8, 3), 1),
            "t must be an array of 1 int32 or float32, one for each .*, and not the int 1",
        ),
        (
            lambda: called((2, 8, 8, 3), np.zeros(3, np.int32)),
            "t must be an array of 2 .*, and not the ndarray",
        ),
        (
            lambda: next(Sampling(small_unet(), count=2).batches(2)),
            "progress is a function to call, and not the int 2",
        ),
        (
            lambda: alpha_bars("linear", 1.5),
            "the number of diffusion steps must be a whole number, and not the float 1.5",
        ),
        (
            lambda: spaced_timesteps(1000, "10"),
            "sampling steps must be a whole number, and not the str '10'",
        ),
        (
            lambda: RandomConv()(np.zeros((1, 32, 32, 3))),
            r"as an array uint8 \(B, H, W, 3\), and not float64",
        ),
        (lambda: RandomConv()([0]), r"and not the list \[0\]"),
        (
            lambda: open_dataset(image_size="x"),
            "image_size must be a whole number, or height and width, and not the str 'x'",
        ),
        (lambda: open_dataset(classes=3), "classes must be a list of names, and not the int 3"),
        (lambda: open_dataset(classes=[3]), "classes must be a list of names"),
        (lambda: open_dataset(3), "a dataset is opened by its path, and not by the int 3"),
        (lambda: AdamW(small_unet().parameters, beta1="x"), "--beta1 x must be a finite number"),
    ],
)
def test_what_is_wrong_is_one_sentence(call, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_numpys_integers_are_integers():
    model = UNet(
        **{
            name: np.int64(value) if type(value) is int else value
            for name, value in models.UNET.items()
        },
        num_classes=np.int64(3),
    )
    assert {type(value) for value in model.options.values()} <= {
        int,
        float,
        bool,
        str,
        list,
        type(None),
    }
    images = numdiff.sample(
        model, count=np.int64(2), steps=np.int32(1), seed=np.int64(1), batch=np.int64(1)
    )
    assert images.shape == (2, 8, 8, 3)
    assert Linear(np.int64(2), np.int32(3)).weight.shape == (3, 2)


@pytest.mark.parametrize("gradient", [1.0, np.ones(3, np.float32)])
def test_a_gradient_of_another_shape_is_refused(gradient):
    x = Tensor(np.zeros((1, 8, 8, 3), np.float32), requires_grad=True)
    with Tape() as tape:
        y = small_unet()(x, T)
    with pytest.raises(ValueError, match=r"has its shape, \(1, 8, 8, 3\), and not"):
        tape.backward(y, gradient)
    with pytest.raises(ValueError, match="an output that depends on a parameter"):
        tape.backward(np.ones(3), gradient)


def test_the_emulator_is_imported_on_first_use():
    assert numdiff.emulator.device and "emulator" in numdiff.__all__


@pytest.mark.parametrize("given", [{"steps": "5"}, {"steps": -1}, {"steps": 1, "report_every": 0}])
def test_steps_that_cannot_be_run(given):
    trainer = Trainer(small_unet(), ImageList(), batch=2)
    with pytest.raises(UsageError, match="must be a whole number of at least"):
        list(trainer.run(**given))


def test_a_diffusion_may_be_given_as_such():
    trainer = Trainer(
        small_unet(), ImageList(), batch=2, diffusion=Diffusion(steps=10, prediction="v")
    )
    assert trainer.diffusion.options["prediction"] == "v"
