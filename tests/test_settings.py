"""Settings: one declaration, from which options, files and constructors' arguments follow."""

import inspect
import re

import numpy as np
import pytest

from numdiff import settings
from numdiff.configs import AdamWConfig, MuonConfig, TrainerConfig
from numdiff.errors import UsageError
from numdiff.nn import AdamW, UNet
from numdiff.settings import (
    COMMON,
    SAME,
    Argument,
    arguments,
    check_value,
    configure,
    setting,
    settings_in,
)
from numdiff.training import Trainer, kinds
from numdiff.training.options import TrainOptions, resolve, resolve_resumed


class SettingsTable:
    often: int = setting(
        5, "How often.", unit="N", low=1, high=9, resume=True, trainer=2, adamw=Argument(name="n")
    )
    names: tuple[str, ...] | None = setting(None, "Which.", trainer=SAME)
    fast: str = setting(
        "no",
        "Whether.",
        choices=("no", "yes"),
        trainer=Argument(False, "quick", lambda value: value == "yes"),
    )


def test_a_line_says_it_all():
    often, names, fast = settings_in(SettingsTable).values()
    assert (often.kind, often.many, often.open, often.default, often.group, often.resume) == (
        int,
        False,
        False,
        5,
        "SettingsTable",
        True,
    )
    assert (names.kind, names.many, names.open, fast.choices) == (str, True, True, ("no", "yes"))
    assert often.argument("trainer")[:2] == ("often", 2) and often.argument("adamw")[:2] == ("n", 5)
    assert often.range == "at least 1 and at most 9" and fast.range == ""


def test_a_reader_gets_its_arguments():
    class Options:
        often, names, fast = 7, ("a",), "yes"

    assert arguments("trainer", Options, settings_in(SettingsTable)) == {
        "often": 7,
        "names": ("a",),
        "quick": True,
    }
    assert arguments("adamw", Options, settings_in(SettingsTable)) == {"n": 7}


@pytest.mark.parametrize(
    "value, sentence",
    [
        (0, "--often 0 must be at least 1 and at most 9"),
        (True, "--often True must be a whole number"),
        ((1,), "--often 1 must be one value"),
        (None, "--often None must be a whole number"),
    ],
)
def test_a_wrong_value_is_a_sentence(value, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_value(settings_in(SettingsTable)["often"], value)


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            {"bach": 3},
            "Trainer has no argument 'bach' (did you mean 'batch'?): correct it, or leave it out.",
        ),
        ({"hue": 3}, "Trainer has no argument 'hue': correct it, or leave it out."),
        ({"cosine": "yes"}, "cosine yes must be True or False"),
        ({"total_steps": 2.5}, "total_steps 2.5 must be a whole"),
        ({"batch": 0}, "--batch 0 must be at least 1"),
        ({"microbatch": "a"}, "--microbatch a must be a whole number"),
    ],
)
def test_arguments_that_cannot_be(given, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        configure("trainer", None, given, "Trainer")


def test_the_constructors_arguments_are_the_tables():
    for reader, kind in (("trainer", Trainer), ("adamw", AdamW)):
        signature = inspect.signature(kind)
        named = dict(
            line.argument(reader)[:2] for line in COMMON.values() if reader in line.readers
        )
        assert {
            name: p.default for name, p in signature.parameters.items() if name in named
        } == named
        assert not [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        assert all(f"    {name}: " in kind.__doc__ for name in named)
    assert inspect.signature(Trainer).parameters["warmup_steps"].default == 100
    assert COMMON["warmup_steps"].default == 200


def test_the_optimizer_reads_what_it_is_given():
    model = UNet(image_size=8, model_channels=32, channel_mult=(1,), num_res_blocks=1, device="cpu")
    optimizer = AdamW(
        model.parameters,
        learning_rate=0.5,
        eps=1e-3,
        ema_decay=0.9,
        warmup_steps=2,
        cosine=True,
        total_steps=10,
    )
    read = vars(optimizer.config)
    assert (read["eps"], read["beta1"], read["clip_norm"], read["cosine"]) == (1e-3, 0.9, 0.0, True)
    model.parameters.grad[:] = 1
    optimizer.update(np.ones(1, np.float32))
    assert optimizer.rate[0] == np.float32(0.25)
    with pytest.raises(UsageError, match="AdamW has no argument 'lr'"):
        AdamW(model.parameters, lr=1e-3)


def test_the_typed_configurations_are_the_tables():
    assert settings.CONFIGS_FILE.read_text(encoding="utf-8") == settings.configs_text(), (
        "run `python -m numdiff.settings`"
    )


def test_a_configuration_and_names_mean_the_same():
    config = TrainerConfig(batch=8, learning_rate=0.5, freeze=["a.*"])
    checked = configure("trainer", config, {}, "Trainer")
    assert checked == configure(
        "trainer", None, {"batch": 8, "learning_rate": 0.5, "freeze": "a.*"}, "Trainer"
    )
    assert checked.freeze == ("a.*",) and checked.warmup_steps == 100
    both = configure("trainer", config, {"batch": 4, "ema_std": (0.1,)}, "Trainer")
    assert (both.batch, both.learning_rate, both.ema_std) == (4, 0.5, (0.1,))
    assert configure("muon", MuonConfig(momentum=0.5), {"beta1": 0.8}, "Muon").momentum == 0.5


@pytest.mark.parametrize(
    "config, sentence",
    [
        (AdamWConfig(), "Trainer takes a TrainerConfig as config, and not .*: give TrainerConfig"),
        ({"batch": 3}, "Trainer takes a TrainerConfig as config, and not the dict"),
        (TrainerConfig(batch=0), "--batch 0 must be at least 1"),
        (TrainerConfig(cosine="yes"), "cosine yes must be True or False"),
    ],
)
def test_a_configuration_that_cannot_be(config, sentence):
    with pytest.raises(UsageError, match=sentence):
        configure("trainer", config, {}, "Trainer")


def test_every_setting_is_read_and_its_help_stands_once():
    lines = {
        (kind.name, name): line
        for kind in kinds.every().values()
        for name, line in kind.table.items()
    }
    assert all(line.help.endswith((".", "]")) and line.help[0].isupper() for line in lines.values())
    options = resolve({"device": "cpu", "ema_std": (0.1,)})
    assert vars(options).keys() == {name for _, name in lines}
    for name, line in COMMON.items():  # what a resumed run may change, in the declaration
        if line.resume and line.kind is int and name != "steps":
            assert getattr(resolve_resumed(options, {name: 1}), name) == 1
    with pytest.raises(TypeError, match="there is no setting 'bach'"):
        TrainOptions(bach=3)
