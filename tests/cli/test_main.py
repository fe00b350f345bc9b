"""The command line: help of every command, and one sentence for every error."""

import contextlib
import errno
import math
import os
import re
import signal
import subprocess
import sys

import click
import h5py
import numpy as np
import pytest
from PIL import Image

import numdiff
from numdiff.data import open_dataset
from numdiff.data.dataset import class_names
from numdiff.errors import NumdiffError, UsageError
from numdiff.nn.module import FlatParameters
from numdiff.setting import flag, say, say_limit
from numdiff.training.checkpoint import checkpoint_name, save_checkpoint
from numdiff.training.options import resolve, settings_of
from numdiff.training.run_folder import create_run
from numdiff_cli import settings
from numdiff_cli.main import main
from numdiff_cli.values import Number
from tests.cli.fuzz_options import commands
from tests.command import last_line, run
from tests.conftest import needs
from tests.models import small_dit, write


@pytest.mark.parametrize(
    "command",
    [
        "",
        *main.list_commands(None),
        "train unet",
        "train dit",
        "bench step",
        "bench step unet",
        "bench step dit",
        "bench block",
        "data import",
        "data info",
    ],
)
def test_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and result.output.startswith("Usage: ")


@pytest.mark.parametrize(
    "command", ["data", "kernels", "bench", "bench quality", "compile", "profile"]
)
def test_a_groups_help_has_whole_sentences(command):
    text = run(command, "--help").output.partition("Commands:\n")[2]
    assert text.rstrip().endswith(".") and "..." not in text


@pytest.mark.parametrize(
    "model, note",
    [
        ("unet", "[on the emoji tiny: yes; unet64: yes]"),
        ("dit", "[on the emoji tiny: Smileys & Emotion,Food & Drink,Flags"),
    ],
)
def test_the_help_shows_the_settings_for_the_emoji(model, note):
    assert note in " ".join(run("train", model, "--help").output.split())
    assert "on the emoji" not in run("bench quality", model, "--help").output


@needs("full")
@pytest.mark.parametrize("given", ["--help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_help_on_a_full_disk_is_one_sentence(given, unbuffered):
    with open("/dev/full", "w") as full:
        script = "from numdiff_cli.main import main; main()"
        result = subprocess.run(
            [sys.executable, "-c", script, given],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (result.returncode, result.stderr) == (1, b"Error: No space left on device.\n")


@pytest.mark.parametrize(
    "model, sizes", [("unet", "[tiny: 32; unet64: 64]"), ("dit", "[tiny: 32; small64: 64]")]
)
def test_every_setting_is_an_option(model, sizes):
    text = " ".join(run("train", model, "--help").output.split())
    for name in settings_of(model):
        assert flag(name) in text
    assert "--resume" in text and "--dry-run" in text and sizes in text
    assert ("--mlp-ratio" in text, "--channel-mult" in text) == (model == "dit", model == "unet")


@pytest.mark.parametrize(
    "name, count",
    [
        ("DiT-S/2", 32_963_360),
        ("DiT-B/2", 130_512_416),
        ("DiT-L/2", 458_102_816),
        ("DiT-XL/2", 675_129_632),
    ],
)
def test_a_dry_run_counts_parameters_and_builds_nothing(tmp_path, monkeypatch, name, count):
    """The public sizes, of which the largest would take sixteen gigabytes to train, as is said."""
    monkeypatch.chdir(tmp_path)
    original = FlatParameters.__init__

    def without_memory(self, *arguments, **more):
        original(self, *arguments, **more)
        assert not isinstance(self.data, np.ndarray)  # but addresses of the planner's stand-in

    monkeypatch.setattr(FlatParameters, "__init__", without_memory)
    result = run(
        "train dit --model",
        name,
        "--size 32 --channels 4 --classes 1000 --dry-run --device cpu",
    )
    assert result.exit_code == 0 and f" {count:,} parameters" in result.output, result.output
    assert "MiB of memory" in result.output
    assert re.search(
        "^classes +all of the dataset, in a model for 1,000$", result.output, re.MULTILINE
    )
    assert (
        "data      not opened, as --channels and --num-classes say what the model takes from it\n"
        in result.output
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, expected",
    [
        ("", "no"),
        ("--recompute", "blocks"),
        ("--no-recompute", "no"),
        ("--recompute mlp", "mlp"),
        ("--recompute --eager", "blocks"),
        ("--recompute yes", "blocks"),
        ("--recompute=no", "no"),
    ],
)
def test_what_is_recomputed_with_and_without_a_value(given, expected):
    result = run(f"train dit --preset tiny --device cpu --dry-run {given}")
    assert result.exit_code == 0 and re.search(
        rf"^recompute +{expected}$", result.output, re.MULTILINE
    ), result.output
    assert ("TFLOP more in each step" in result.output) == (expected != "no")


def test_a_dry_run_says_what_settings_mean_that_are_left_out():
    lines = run("train unet --device cpu --dry-run").output.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown["init"] == "none" and shown["microbatch"] == "the batch"
    assert shown["channels"] == "those of the dataset" and "default" not in shown.values()


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("unet", "--classes ALL", ",".join(class_names())),
        ("unet", "", "Smileys & Emotion"),
        ("dit", "--classes all", ",".join(class_names())),
        ("dit", "--classes all,all", "all,all"),
    ],
)
def test_all_classes_without_their_names(name, given, expected):
    """Where a preset would choose a few."""
    shown = run(f"train {name} --device cpu --dry-run {given}")
    assert re.search(rf"^classes +{re.escape(expected)}$", shown.output, re.MULTILINE), shown.output


@pytest.mark.parametrize(
    "names, expected", [(["all", "some"], ["all"]), (["some"], ["some"]), ([], None)]
)
def test_all_classes_of_data(tmp_path, names, expected):
    """Unless one is called so; data without classes are taken as they are."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"] = np.zeros((4, 32, 32, 3), np.uint8)
        if names:
            file["labels"] = np.arange(4) % len(names)
            file.attrs["classes"] = names
    given = settings.classes_given("unet", {"data": str(tmp_path / "d.h5"), "classes": ("all",)})
    shown = open_dataset(given["data"], None, given["classes"])
    assert (shown.classes or None) == expected and len(shown) == 4 // (len(names) or 1) * len(
        expected or [1]
    )


def test_version():
    assert run("--version").output == f"numdiff {numdiff.__version__}\n"


def test_every_name_of_the_package_is_there():
    assert all(getattr(numdiff, name) is not None for name in numdiff.__all__)
    assert numdiff.evaluation.__name__ == "numdiff.evaluation"


def test_help_loads_nothing_heavy():
    script = (
        "import sys\nfrom numdiff_cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'numpy', 'numba', 'h5py', 'PIL'} & set(sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode
        == 0
    )


@pytest.mark.parametrize(
    "error, exit_code, output",
    [
        (NumdiffError("the disk\nis full."), 1, "Error: the disk is full.\n"),
        (UsageError("--batch 3 is odd."), 2, "Error: --batch 3 is odd.\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted.\n"),
        (
            MemoryError("Unable to allocate 3 GiB"),
            1,
            "Error: this machine is out of memory (Unable to allocate 3 GiB); use a smaller --microbatch, --batch or "
            "model.\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a.png"),
            1,
            "Error: a.png: Permission denied; check the path and its permissions.\n",
        ),
        *(
            (
                error,
                1,
                "Error: this system allows this user no further threads or processes: raise the limit (ulimit -u), or "
                "end other programs.\n",
            )
            for error in (
                RuntimeError("can't start new thread"),
                BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            )
        ),
    ],
)
def test_errors_become_one_sentence(monkeypatch, error, exit_code, output):
    @click.command()
    def info():
        raise error

    monkeypatch.setattr("numdiff_cli.info.info", info)
    result = run("info")
    assert (result.exit_code, result.output.lstrip("\n")) == (exit_code, output)


SIGNALLED = """
import atexit, os, signal
import click
from numdiff.files import write_text
from numdiff_cli import info, main

@click.command()
def command():
    try:
        write_text("a.txt", Text())
    finally:
        os.kill(os.getpid(), signal.%s)  # at once again, as from a closing terminal

class Text:
    def encode(self):
        assert len(os.listdir()) == 1
        os.kill(os.getpid(), signal.%s)

info.info = command
atexit.register(lambda: %s)
main.main(["info"])
"""


@needs("posix")
@pytest.mark.parametrize(
    "name, code, message",
    [
        ("SIGTERM", 143, "ended by SIGTERM."),
        ("SIGHUP", 129, "ended by SIGHUP."),
        ("SIGINT", 130, "interrupted."),
    ],
)
@pytest.mark.parametrize("at_exit", [False, True])
def test_a_signal_leaves_one_sentence_and_no_file(tmp_path, name, code, message, at_exit):
    """Also one that comes while Python ends."""
    again = name if name != "SIGINT" else "SIGCONT"
    last = f"os.kill(os.getpid(), signal.{name})" if at_exit else None
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED % (again, name, last)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == f"Error: {message}\n" and not os.listdir(tmp_path)
    assert done.returncode == (-getattr(signal, name) if at_exit else code)


def test_a_signal_as_the_work_ends_prints_nothing(monkeypatch):
    @contextlib.contextmanager
    def late():
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "context", late)
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"numdiff {numdiff.__version__}\n")
    result = run("info")
    assert (
        result.exit_code == 130 and "Aborted" not in result.output and "will run" in result.output
    )


@needs("posix")
def test_a_signal_during_the_imports_prints_nothing():
    script = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'click':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "import numdiff_cli.main"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_fault_of_numdiff_itself_is_not_hidden(monkeypatch):
    @click.command()
    def info():
        raise ZeroDivisionError

    monkeypatch.setattr("numdiff_cli.info.info", info)
    with pytest.raises(ZeroDivisionError):
        run("info")


@pytest.mark.parametrize(
    "folder, said",
    [
        ("", "made when a kernel is compiled"),
        ("new/er", "made when a kernel"),
        ("file", "cannot be written: set NUMDIFF_CACHE_DIR to a folder that can"),
    ],
)
def test_info_says_whether_kernels_can_be_kept(tmp_path, monkeypatch, folder, said):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / folder))
    assert re.search(rf"^cache .*\({said}", run("info").output, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("train unet --steps 1e3", "'1e3' is not a valid whole number."),
        ("sample 0 --eta x", "'x' is not a valid number."),
        ("bench step dit --batch 1,000", "'1,000' is not a valid whole number."),
    ],
)
def test_what_is_no_number_is_told_in_plain_words(arguments, words):
    result = run(arguments)
    assert result.exit_code == 2 and words in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("train unet --lr 0", "0 is not in the range x>0."),
        ("train unet --beta1 1", "1 is not in the range 0<=x<1."),
        ("train unet --weight-decay 1e9", "1000000000 is not in the range 0<=x<=1000000."),
        ("train unet --adam-eps 1e-31", "1e-31 is not in the range 1e-30<=x<=1."),
        ("train unet --loss-scale 0", "0 is not in the range 5.96046e-08<=x<=1.84467e+19."),
        ("train unet --ema-std 1,2", "--ema-std 1,2 must be at least 0.005 and at most 0.28."),
        (
            "train unet --loss v --min-snr-gamma 5",
            "--loss v and --min-snr-gamma 5 exclude each other",
        ),
        ("train unet --cfg-interval 5,0.30", "--cfg-interval 5,0.3 must be two noise levels"),
        ("train unet --class-dropout 0.5", "--class-dropout 0.5 needs --class-cond"),
        ("train unet --vlb-weight 2 --no-learn-sigma", "--vlb-weight 2 weighs"),
    ],
)
def test_numbers_are_told_as_one_types_them(arguments, words):
    result = run(arguments, "--dry-run")
    assert result.exit_code == 2 and words in result.output


@pytest.mark.parametrize(
    "value, said",
    [
        (1.0, "1"),
        (1e-5, "1e-05"),
        (0.1, "0.1"),
        (1e6, "1000000"),
        (1e30, "1e+30"),
        (np.float32(2), "2"),
        (True, "True"),
        (3, "3"),
        ((0.3, 5.0), "0.3,5"),
        ((), "none"),
        (None, "None"),
        ("a\n", "a\\n"),
        (math.nan, "nan"),
    ],
)
def test_say(value, said):
    assert say(value) == said


@pytest.mark.parametrize(
    "value, said",
    [
        (0.001, "0.001"),
        (1e6, "1000000"),
        (2**20, "1048576"),
        (1e9, "1000000000"),
        (1e30, "1e+30"),
        (-1000.0, "-1000"),
        (2.0**-24, "5.96046e-08"),
    ],
)
def test_limits_are_told_in_short(value, said):
    assert say_limit(value) == said


def test_ranges_in_help():
    """Ranges of floats are shortened; those of integers are click's."""
    text = run("train unet --help").output
    assert (
        "5.96046e-08<=x<=1.84467e+19" in text
        and "x<=1e+30]" in text
        and "[1<=x<=1000000000]" in text
    )
    limits = re.findall(r"[(\[]?([-\d.e+]+)<=?x|x[<>]=?([-\d.e+]+)", text)
    assert all(len(limit) <= 12 for pair in limits for limit in pair)
    for given, said in (
        ((0, None, True), "x>0"),
        ((0.5,), "x>=0.5"),
        ((None, 1.0), "x<=1"),
        ((0.0, 1.0), "0<=x<=1"),
        ((None, 1, False, True), "x<1"),
    ):
        assert Number(*given)._describe_range() == said


def test_choices_go_in_any_case_and_stay_what_they_are():
    """Of every option of every command; what options.json gets, and what help shows, is the word as
    it is known."""
    seen = set()
    for name, command in commands():
        context = click.Context(command)
        for parameter in command.params:
            if not isinstance(parameter.type, click.Choice):
                continue
            seen.add((name, parameter.name))
            assert len({choice.casefold() for choice in parameter.type.choices}) == len(
                parameter.type.choices
            )
            for choice in parameter.type.choices:
                for given in (choice, choice.upper(), choice.lower(), choice.title()):
                    assert parameter.type.convert(given, parameter, context) == choice, (
                        name,
                        parameter.name,
                    )
    assert {
        ("train dit", "architecture"),
        ("train unet", "optimizer"),
        ("train unet", "recompute"),
        ("train dit", "preset"),
        ("sample", "sampler"),
        ("convert", "attention_order"),
        ("evaluate", "device"),
        ("kernels check", "device"),
        ("bench tune", "of"),
        ("data import", "fit"),
        ("profile unet", "clock"),
    } <= seen
    result = run(
        "train dit --dry-run --model dit-b/2 --optimizer Muon --recompute YES",
    )
    for said in (r"architecture +DiT-B/2\n", r"optimizer +muon\n", r"recompute +blocks\n"):
        assert re.search(said, result.output), result.output
    wrong = run("train dit --model dit-b")
    assert wrong.exit_code == 2 and "'dit-b' is not one of 'DiT-S/2', " in wrong.output


def test_info():
    result = run("info")
    assert result.exit_code == 0
    for word in ("numba ", "gpu ", "mpi ", "cache ", "will run", "fp32"):
        assert word in result.output


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("trian", "No such command 'trian'. Did you mean 'train'?"),
        ("train unte", "Did you mean 'unet'?"),
        ("data imprt", "Did you mean 'import'?"),
        ("bench step ditt", "Did you mean 'dit'?"),
        ("bench stpe", "'step'"),
        ("kernels chek", "Did you mean 'check'?"),
        ("profile nuet", "Did you mean 'unet'?"),
        ("xyzzy", "No such command 'xyzzy'."),
    ],
)
def test_near_commands_are_suggested(arguments, hint):
    result = run(arguments)
    assert (
        result.exit_code == 2
        and hint in result.output
        and ("Did" in hint) >= ("Did" in result.output)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "sample ''",
        "sample auto --guide-with ''",
        "sample auto --class ''",
        "data info ''",
        "evaluate '' b.npz",
        "convert a.pt ''",
        "train unet --outdir ''",
        "train unet --data ''",
    ],
)
def test_empty_names_are_refused(arguments):
    """As of a variable of the shell that is not set; they would count as none, or as this folder."""
    result = run(arguments)
    assert result.exit_code == 2 and "it is empty: give a value, or leave it out." in result.output


BAD_INPUT = [  # arguments, exit code, what the message says
    ("frobnicate", 2, "No such command"),
    ("train unet --batch 0", 2, "--batch"),
    ("train unet --steps many", 2, "--steps"),
    ("train unet --dropout 1", 2, "--dropout"),
    ("train unet --channel-mult 1,b", 2, "--channel-mult"),
    (
        "train unet --batch 10 --microbatch 4",
        2,
        "--batch 10 is not divisible by --microbatch 4; use",
    ),
    ("train unet --outdir {tmp}/file", 1, "there is a file of this name; choose another"),
    ("train unet --data {tmp}/missing.h5", (1, 2), "missing.h5"),
    ("train unet --data {tmp}/file", 1, "file"),
    ("train unet --data {tmp}/cut.h5", 1, "cut.h5"),
    ("train unet --image-size 48", (1, 2), "48"),
    ("train unet --classes Dragons", (1, 2), "Dragons"),
    ("train unet --resume --outdir {tmp}/nowhere", 1, "no run with a checkpoint"),
    ("train unet --resume {tmp}/nowhere", 1, "does not exist"),
    ("train unet --resume {tmp}/cut.h5", 1, "damaged"),
    ("train unet --resume {run}", 1, "has no valid checkpoint"),
    ("train unet --mlp-ratio 2", 2, "--mlp-ratio"),
    ("train dit --channel-mult 1,2", 2, "--channel-mult"),
    ("train dit --model DiT-S/3", 2, "'DiT-S/3' is not one of"),
    ("train dit --classes 2", 2, "--num-classes 2: '"),
    (
        "train dit --num-classes 2",
        2,
        "has 9 classes; give that number or more, or --classes with the names",
    ),
    (
        "train dit --classes 7 --data {tmp}/numbers.h5",
        2,
        "--classes 7 may mean 7 classes, or the one that is called 7: "
        "give --num-classes 7, or --classes 7,7 for that one.",
    ),
    ("train dit --classes 7 --data {tmp}/numbers", 2, "--classes 7 may mean 7 classes"),
    ("train dit --classes 8 --num-classes 2", 2, "has no class '8'"),
    ("train dit --classes 0", 2, "--num-classes 0 must be at least 1"),
    ("train dit --classes 9 --no-class-cond", 2, "--num-classes needs --class-cond"),
    ("train dit --channels 4", 2, "--channels 4: the images of"),
    (
        "train dit --class-cond --data {tmp}/plain.h5",
        2,
        "has none: import it again with labels, or give --no-class-cond.",
    ),
    ("train dit --data {tmp}/wrong.h5", 1, "label 2 of image 1"),
    (
        "train dit --data {tmp}/latents.h5 --flip --size 8",
        2,
        "which do not mirror: give --no-flip.",
    ),
    ("train dit --data {tmp}/latents.h5 --size 16", 2, "use image size 8."),
    ("sample {tmp}/nowhere", 1, "does not exist"),
    ("sample {tmp}/plain_dit.h5 --class 0", 2, "trained without classes"),
    ("sample {tmp}/file", 1, "file"),
    ("sample {tmp}/cut.h5", 1, "damaged"),
    ("sample {run}", 1, "no valid checkpoint"),
    ("bench step unet --steps 0", 2, "--steps"),
    ("bench step unet --precision fp4", 2, "'fp4' is not one of"),
]


def write_datasets(folder):
    for name, images, labels in (
        ("plain", np.zeros((4, 32, 32, 3), np.uint8), None),
        ("wrong", np.zeros((4, 32, 32, 3), np.uint8), [0, 2, 1, 1]),
        ("latents", np.zeros((4, 8, 8, 4), np.float32), [0, 0, 1, 1]),
        ("numbers", np.zeros((4, 8, 8, 3), np.uint8), [0, 0, 1, 1]),
    ):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["images"] = images
            if labels:
                file["labels"], file.attrs["classes"] = (
                    labels,
                    ["7", "40"] if name == "numbers" else ["a", "b"],
                )
    for name in ("7", "40"):
        (folder / "numbers" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "numbers" / name / "a.png")


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    """(a folder with files of all kinds, a run without checkpoints in it)"""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").write_text("neither a folder nor a dataset")
    save_checkpoint(folder / "cut.h5", {"parameters": np.ones(9, np.float32)}, {"step": 1})
    (folder / "cut.h5").write_bytes((folder / "cut.h5").read_bytes()[:-100])
    write_datasets(folder)
    write(folder / "plain_dit.h5", small_dit(num_classes=None))
    options = {"device": "cpu", "preset": "tiny", "outdir": str(folder / "runs")}
    return folder, create_run(resolve(options))


@pytest.mark.parametrize(
    "arguments, exit_code, message", BAD_INPUT, ids=[a for a, _, _ in BAD_INPUT]
)
def test_bad_input(bad_files, monkeypatch, arguments, exit_code, message):
    folder, run_dir = bad_files
    monkeypatch.chdir(folder)
    if arguments.startswith(("train", "bench")):
        arguments += " --device cpu"
    result = run(arguments.format(tmp=folder, run=run_dir))
    assert result.exit_code in np.atleast_1d(exit_code)
    assert "Traceback" not in result.output
    last = last_line(result)
    assert last.startswith("Error: ") and message in last


def test_no_gpu(monkeypatch):
    monkeypatch.setattr("numdiff.device.why_no_gpu", lambda: "there is none")
    result = run("train unet --device cuda")
    assert result.exit_code == 2
    assert "--device cuda: no GPU can be used (there is none); use --device cpu." in result.output


SMALL = (
    "--device cpu --preset tiny --size 16 --channel-mult 1,2 --attention-resolutions 8 --batch 2 "
    "--sample-count 2 --sample-steps 2"
)


def test_train_resume_sample(tmp_path, monkeypatch):
    """The commands of the README, on the smallest scale."""
    monkeypatch.chdir(tmp_path)
    dry = run("train unet", SMALL, "--dry-run")
    assert (
        dry.exit_code == 0
        and "parameters" in dry.output
        and "TFLOP" in dry.output
        and not list(tmp_path.iterdir())
    )
    assert any(line.split() == ["batch", "2"] for line in dry.output.splitlines())
    first = run("train unet", SMALL, "--steps 1")
    assert first.exit_code == 0, first.output
    run_dir = tmp_path / "runs" / "00000-unet-tiny"
    assert {"options.json", "stats.jsonl", "loss.png", checkpoint_name(1)} <= {
        p.name for p in run_dir.iterdir()
    }

    assert "--batch 4 does not fit the run" in run("train unet --resume --batch 4").output
    assert (
        "continue with: numdiff train unet --resume runs/00000-unet-tiny"
        in run("train dit --resume").output
    )
    assert (
        "--init-weights and --resume exclude each other"
        in run("train unet --resume --init-weights ema").output
    )
    options = (run_dir / "options.json").read_text()
    (run_dir / "options.json").write_text(options[:99])
    damaged = run("train unet --resume")
    assert damaged.exit_code == 1 and "with --init runs/00000-unet-tiny." in damaged.output
    assert run("train unet", SMALL, "--init runs/00000-unet-tiny --dry-run").exit_code == 0
    (run_dir / "options.json").write_text(options)
    done = run("train unet --resume")
    assert done.exit_code == 1 and "has done its 1 step; give more with --steps" in done.output
    again = run("train unet --resume", run_dir, "--steps 2")
    assert again.exit_code == 0 and (run_dir / checkpoint_name(2)).exists(), again.output
    other = run(
        "train unet",
        SMALL,
        "--steps 1 --num-res-blocks 2 --path discrete --sample-count 0",
    )
    assert other.exit_code == 0
    (run_dir / checkpoint_name(3)).write_bytes(
        (tmp_path / "runs" / "00001-unet-tiny" / checkpoint_name(1)).read_bytes()
    )
    wrong = run("train unet --resume", run_dir, "--steps 5")
    assert wrong.exit_code == 1 and "another model" in wrong.output

    images = run("sample 1 --count 2 --steps 2 --grid a.png --device cpu")
    assert images.exit_code == 0 and (tmp_path / "a.png").exists(), images.output
    for name, value, message in (
        ("--class", "Objects", "class"),
        ("--steps", 5_000_000, "5000000"),
        ("--grid", "a", ".png"),
    ):
        result = run("sample 1 --count 2 --device cpu", name, value)
        assert result.exit_code in (1, 2) and message in last_line(result)


@pytest.mark.usefixtures("no_curves")
def test_train_and_sample_a_dit(tmp_path, monkeypatch):
    """Three classes, a column each in the grid; then guided samples of one class."""
    monkeypatch.chdir(tmp_path)
    trained = run(
        "train dit --device cpu --batch 2 --steps 1 --sample-count 3 --sample-steps 1 --depth 1"
    )
    run_dir = tmp_path / "runs" / "00000-dit-tiny"
    assert trained.exit_code == 0 and (run_dir / "samples-00000001.png").exists(), trained.output
    again = run("train dit --resume --steps 2 --sample-count 0")
    assert again.exit_code == 0 and (run_dir / checkpoint_name(2)).exists(), again.output
    assert "was started with 3" not in again.output
    unet = run("train unet --resume --steps 3")
    assert unet.exit_code in (1, 2) and "Error: " in unet.output.splitlines()[-1]
    images = run(
        "sample 0 --count 2 --steps 1 --class flags --cfg-scale 2 --device cpu",
    )
    assert images.exit_code == 0 and (tmp_path / "samples.png").exists(), images.output


@pytest.mark.parametrize("model", ["unet", "dit"])
def test_bench(model):
    result = run(
        *f"bench step {model} --preset tiny --device cpu --batch 2 --steps 1 --warmup 0".split()
    )
    assert result.exit_code == 0 and "median of 1" in result.output, result.output
