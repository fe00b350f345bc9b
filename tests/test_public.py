"""The public names: each has an example that runs, hints for type checkers, and one sentence for what is wrong."""
import inspect
import pathlib
import re
import typing

import numpy as np
import pytest

import numdiff
from numdiff.data import open_dataset
from numdiff.diffusion import SAMPLERS, Diffusion, Sampling
from numdiff.errors import UsageError
from numdiff.nn import AdamW, DiT, UNet
from numdiff.training import Trainer

PAGE = (pathlib.Path(numdiff.__file__).parent / "README.md").read_text(encoding="utf-8")
SMALL = {"image_size": 8, "model_channels": 32, "channel_mult": (1,), "num_res_blocks": 1, "device": "cpu"}


@pytest.mark.parametrize("module", ["numdiff", "numdiff.training", "numdiff.data"])
def test_every_public_name_has_an_example(module):
    """A heading a name, and Python beneath it that uses it; tests/test_readme.py runs them all."""
    for name in __import__(module, fromlist=["__all__"]).__all__:
        (section,) = re.findall(rf"^## `{module}\.{name}`.*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
        (example, *_) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        assert re.search(rf"\b{name}\b", example) and section.split("```")[0].strip(), name


def public_functions():
    """{name: function} of the functions, methods and properties behind the public names, and of the samplers."""
    found = dict(SAMPLERS)
    for module in (numdiff, numdiff.training, numdiff.data, numdiff.diffusion, numdiff.nn):
        for name in module.__all__:
            value = getattr(module, name)
            members = {name: value} if inspect.isfunction(value) else {
                f"{name}.{part}": getattr(member, "__func__", getattr(member, "fget", member))
                for part, member in vars(value).items() if part == "__init__" or not part.startswith("_")
            } if inspect.isclass(value) else {}
            found |= {f"{module.__name__}.{key}": f for key, f in members.items() if inspect.isfunction(f)}
    return found


@pytest.mark.parametrize("name, function", public_functions().items(), ids=public_functions())
def test_type_checkers_are_told(name, function):
    """The type of every argument, and of every result."""
    signature = inspect.signature(function)
    assert [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"] == []
    assert signature.return_annotation is not signature.empty or name.endswith(".__init__")


def test_types_are_there_when_they_are_asked_for():
    assert (pathlib.Path(numdiff.__file__).parent / "py.typed").exists()
    for function in (numdiff.load, numdiff.sample, open_dataset, UNet.__init__, DiT.forward, Sampling.__init__,
                     Diffusion.__init__, Trainer.run, UNet.predict, AdamW.update, *SAMPLERS.values()):
        assert typing.get_type_hints(function), function


class Images:
    shape, labels, dtype = (4, 8, 8, 3), None, np.dtype(np.uint8)


@pytest.mark.parametrize("call, sentence", [
    (lambda: Trainer(UNet(**SMALL), Images(), diffusion=7), "diffusion must be a dict of steps, .* the int 7"),
    (lambda: Trainer(3, Images()), "a Trainer takes a model, such as a numdiff.nn.UNet, and not the int 3"),
    (lambda: Trainer(UNet(**SMALL), "a.h5"), "a Trainer takes a dataset, .* and not the str 'a.h5'"),
    (lambda: Trainer(UNet(**SMALL), Images(), batch=None), "--batch None must be a whole number"),
    (lambda: numdiff.load(3), "numdiff.load takes the path of a checkpoint, .*, and not the int 3"),
    (lambda: numdiff.load(None), "and not the NoneType None"),
    (lambda: numdiff.sample("runs/0"), "samples are made from a model, .* and not from the str 'runs/0'"),
    (lambda: numdiff.sample(UNet(**SMALL), count="4"), "count must be a whole number, and not the str '4'"),
    (lambda: numdiff.sample(UNet(**SMALL), steps=2.5), "steps must be a whole number or a respacing .* the float 2.5"),
    (lambda: numdiff.sample(UNet(**SMALL), seed=1.5), "seed must be a whole number"),
    (lambda: UNet(**{**SMALL, "image_size": "8"}), "image_size must be a whole number, and not the str '8'"),
    (lambda: UNet(**{**SMALL, "channel_mult": 2}), "channel_mult must be a list or tuple, each item a number, and not"),
    (lambda: UNet(**SMALL, dropout="much"), "dropout must be a number"),
    (lambda: UNet(**SMALL, conv_resample=1), "conv_resample must be True or False, and not the int 1"),
    (lambda: DiT(num_classes=2.5), "num_classes must be a whole number or None"),
    (lambda: UNet(**SMALL).predict("x", 1), "x_t must be an array of numbers, and not the str 'x'"),
    (lambda: open_dataset(image_size="x"), "image_size must be a whole number, and not the str 'x'"),
    (lambda: open_dataset(classes=3), "classes must be a list of names, and not the int 3"),
    (lambda: open_dataset(classes=[3]), "classes must be a list of names"),
    (lambda: open_dataset(3), "a dataset is opened by its path, and not by the int 3"),
    (lambda: AdamW(UNet(**SMALL).parameters, beta1="x"), "--beta1 x must be a finite number"),
])
def test_what_is_wrong_is_one_sentence(call, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("given", [{"steps": "5"}, {"steps": -1}, {"steps": 1, "report_every": 0}])
def test_steps_that_cannot_be_run(given):
    trainer = Trainer(UNet(**SMALL), Images(), batch=2)
    with pytest.raises(UsageError, match="must be a whole number of at least"):
        list(trainer.run(**given))


def test_a_diffusion_may_be_given_as_such():
    trainer = Trainer(UNet(**SMALL), Images(), batch=2, diffusion=Diffusion(steps=10, prediction="v"))
    assert trainer.diffusion.options["prediction"] == "v"
