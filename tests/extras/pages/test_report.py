"""`numdiff report`: the file that it writes, and what it refuses."""

import json
import re
import sys

import pytest

from numdiff.errors import UsageError
from numdiff.extras.pages.report import save_report
from tests.command import output_of, refusal_of
from tests.extras.pages.folders import make_run

HOSTILE = "00000-</script><script>window.pwned=1</script><img src=x onerror=pwned()>"


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_one_file(tmp_path):
    runs = [make_run(tmp_path, steps=40), make_run(tmp_path, steps=20, batch=2)]
    out = tmp_path / "report.html"
    assert output_of("report 0 1 --outdir", tmp_path, "--out", out) == f"report    {out}\n"
    text = out.read_text()
    assert len(text) < 3_000_000
    found = data_of(text)["runs"]
    assert [run["label"] for run in found] == [run.name for run in runs]
    assert [[step for step, _ in run["grids"]] for run in found] == [[20, 40]] * 2
    assert all(url.startswith("data:image/webp;base64,") for _, url in found[0]["grids"])
    assert found[0]["colour"] != found[1]["colour"]
    assert [found[k]["settings"]["steps"] for k in (0, 1)] == ["40", "20"]
    assert data_of(text)["charts"] == ["loss", "norm", "rate", "speed"]


def test_names_are_escaped(tmp_path):
    run_dir = make_run(tmp_path, steps=10, name=HOSTILE.replace("/", "∕"), grids=())
    save_report(tmp_path / "report.html", [run_dir])
    text = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in text and "<script>window.pwned" not in text
    assert data_of(text)["runs"][0]["label"] == run_dir.name


def test_runs_of_one_name_differ_in_their_labels(tmp_path):
    runs = [make_run(tmp_path / name, steps=10, grids=()) for name in "ab"]
    save_report(tmp_path / "report.html", runs)
    labels = [run["label"] for run in data_of((tmp_path / "report.html").read_text())["runs"]]
    assert labels == [runs[0].name, f"{runs[0].name} (2)"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--out a.png", "--out a.png must end in .html."),
        ("--port 80", "--port needs --serve"),
        ("--host ::", "--host needs --serve"),
        ("--serve --out a.html", "--out and --serve exclude each other"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", steps=10, grids=())
    assert sentence in refusal_of("report 0", words)


def test_too_many_runs(tmp_path):
    with pytest.raises(UsageError, match="at most 10 runs, and not 11"):
        save_report(tmp_path / "report.html", [tmp_path] * 11)


def test_without_bokeh(tmp_path, monkeypatch):
    make_run(tmp_path, steps=10)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    sentence = refusal_of("report 0 --outdir", tmp_path)
    assert "pip install 'numdiff-diffusion[report]'" in sentence
