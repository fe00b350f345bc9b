"""`numdiff serve`: pictures by server-sent events, a queue, closed browsers, the PNG's settings."""

import base64
import contextlib
import gc
import http.client
import json
import os
import shlex
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from numdiff.extras.pages import studio as studio_module
from numdiff.extras.pages.server import Server
from numdiff.extras.pages.studio import WAITING, Studio
from numdiff.training.model_files import load_model
from numdiff.training.picture_record import read_record
from tests.command import output_of, run
from tests.conftest import exhaustive, needs
from tests.emulator.browser import Browser
from tests.extras.pages.test_server import ask
from tests.models import small_unet, with_random_weights, write

CLASSES = ["Cats & Dogs", "<img src=x onerror='window.pwned=1'>", "</script><script>window.pwned=1"]
ASKED = {"class": 1, "seed": 7, "guidance": None, "steps": 3, "sampler": "euler"}


def make_model(path):
    model = with_random_weights(small_unet(num_classes=3))
    return write(path, model, classes=CLASSES, step=12)


@contextlib.contextmanager
def serving(path):
    """(studio, server) at work in threads."""
    studio = Studio(load_model(path, "cpu"), path)
    with Server(studio.routes) as server:
        ended = threading.Event()
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,)),
            threading.Thread(target=studio.work, args=(ended.is_set,)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield studio, server
        finally:
            ended.set()
            server.shutdown()
            for thread in threads:
                thread.join()


@pytest.fixture
def served(tmp_path):
    with serving(make_model(tmp_path / "model.h5")) as found:
        yield found


def post(server, **changes):
    return ask(server, "/sample", "POST", body=json.dumps({**ASKED, **changes}))


def events(body):
    """[(name, value)] of a stream."""
    found = [part for part in body.decode().split("\n\n") if part and not part.startswith(":")]
    return [(p.split("\n")[0][7:], json.loads(p.split("\n")[1][6:])) for p in found]


def last_event(server, **changes):
    """(name, value) with which a stream of this server ends."""
    status, body = post(server, **changes)
    assert status == 200
    return events(body)[-1]


def test_a_picture_forms_and_says_how_it_was_made(served, tmp_path, monkeypatch):
    monkeypatch.setattr(studio_module, "PREVIEW_EVERY", 0)
    studio, server = served
    status, body = post(server)
    found = events(body)
    names = [name for name, _ in found]
    assert status == 200 and names[0] == "queued" and names[-1] == "picture"
    assert 1 <= names.count("preview") <= 3
    made = found[-1][1]
    assert CLASSES[1] in made["caption"] and "euler, 3 steps" in made["caption"]
    path, again = tmp_path / "made.png", tmp_path / "again.png"
    path.write_bytes(base64.b64decode(made["png"]))
    record = read_record(path)
    assert record["class_counts"] == [[CLASSES[1], 1]] and record["seed"] == 7
    given = "--count 1 --seed 7 --steps 3 --sampler euler --class 1 --device cpu --grid"
    output_of("sample", studio.checkpoint, given, again)
    with Image.open(path) as picture:
        pixels = np.asarray(picture)
    with Image.open(again) as grid:  # 8×8 pixels, 16 times as large, framed
        assert np.array_equal(np.asarray(grid)[2:-2:16, 2:-2:16], pixels)
    assert "--seed 7 --sampler euler --steps 3 --class" in output_of("info", path)
    words = record["command"]
    assert words[words.index("--class") + 1] == CLASSES[1]
    again.unlink()
    output_of(*map(shlex.quote, words[1:-1]), again)
    with Image.open(again) as grid:
        assert np.array_equal(np.asarray(grid)[2:-2:16, 2:-2:16], pixels)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"class": 3}, "no class 3"),
        ({"class": -1}, "must be"),
        ({"seed": 2**32}, "must be"),
        ({"seed": "1"}, "must be"),
        ({"steps": 10**6}, "must be"),
        ({"sampler": "../x"}, "must be"),
        ({"guidance": "nan"}, "must be"),
        ({"more": 1}, "more"),
    ],
)
def test_settings_that_are_refused(served, changes, sentence):
    status, body = post(served[1], **changes)
    assert status == 400 and sentence in body.decode() and body.count(b"\n") == 1


def test_bodies_that_are_no_settings(served):
    for body in (b"", b"{", b"[]", b"null", b"\xff", b'{"seed": NaN}', b"[" * 3000):
        assert ask(served[1], "/sample", "POST", body=body)[0] == 400
    assert ask(served[1], "/sample")[0] == 405


def test_what_does_not_fit_the_model_is_a_sentence(served):
    name, sentence = last_event(served[1], guidance=2)  # the model has no class for "none"
    assert name == "fault" and sentence.endswith(".") and "--" in sentence
    assert last_event(served[1])[0] == "picture"


def test_twenty_at_once(served):
    """Each is answered, or refused with a sentence."""
    found, lock = [], threading.Lock()

    def one():
        answer = post(served[1], steps=6)
        with lock:
            found.append(answer)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [body for status, body in found if status == 200]
    refused = [body for status, body in found if status == 429]
    assert len(made) + len(refused) == 20 and len(made) >= WAITING
    assert all(events(body)[-1][0] == "picture" for body in made)
    assert all(b"pictures are waiting: try again" in body for body in refused)


def test_a_closed_browser_ends_its_picture_alone(served, monkeypatch):
    monkeypatch.setattr(studio_module, "PREVIEW_EVERY", 0)
    monkeypatch.setattr(studio_module, "ALIVE_EVERY", 0.02)
    body = json.dumps({**ASKED, "steps": 1000}).encode()
    head = f"POST /sample HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served[1].server_port)) as connection:
        connection.sendall(head.encode() + body)
        while b"preview" not in connection.recv(1 << 16):
            pass
    # the next one is made at once, long before 1,000 steps
    assert last_event(served[1])[0] == "picture"
    assert served[0]._now is None or served[0]._now.settings["steps"] != 1000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@exhaustive
@needs("proc")
def test_200_requests_one_after_another(served, request):
    """Each is answered, and memory stays."""
    gc.freeze()  # the server collects after each picture: its own objects alone, not other tests'
    request.addfinalizer(gc.unfreeze)
    for seed in range(40):
        assert last_event(served[1], seed=seed)[0] == "picture"
    gc.collect()
    before = resident()
    for seed in range(200):
        assert last_event(served[1], seed=seed, steps=1 + seed % 3)[0] == "picture"
    gc.collect()
    assert resident() - before < 4 << 20


def test_a_busy_port(tmp_path):
    path = make_model(tmp_path / "model.h5")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", path, "--port", port)
    assert result.exit_code == 1 and result.output.startswith(f"Error: port {port} is in use: ")
    assert result.output.count("\n") == 1


# The page in a browser ----------------------------------------------------------------------------


def open_page(browser, server):
    browser.call("Page.navigate", url=server.url)
    browser.wait("document.body && document.body.dataset.ready === 'yes'")


def other_problems(browser, server):
    return [p for p in browser.problems() if not p.startswith(f"requests {server.url}")]


@exhaustive
@needs("chromium")
def test_the_page(served):
    with Browser(timeout=20) as browser:
        open_page(browser, served[1])
        names = browser.evaluate("[...form.elements.class.options].map(o => o.textContent)")
        assert names == ["chosen by the seed", *CLASSES]
        browser.evaluate(
            "(f => { f.class.value = 2; f.seed.value = 5; f.steps.value = 40 })(form.elements); "
            "document.getElementById('make').click()"
        )
        browser.wait("document.querySelectorAll('#history img').length === 1")
        assert browser.evaluate("document.getElementById('picture').naturalWidth") == 8
        assert CLASSES[2] in browser.evaluate("document.getElementById('state').textContent")
        assert browser.evaluate("save.download") == "numdiff-5.png"
        assert browser.evaluate("save.href").startswith("blob:")
        browser.evaluate("other.click()")
        browser.wait("document.querySelectorAll('#history img').length === 2")
        browser.evaluate("document.querySelectorAll('#history button')[1].click()")
        assert browser.evaluate("form.elements.seed.value") == "5"
        browser.evaluate(
            "form.elements.steps.value = 1000; document.getElementById('make').click()"
        )
        browser.wait("document.getElementById('state').textContent.startsWith('evaluation')")
        browser.evaluate("document.getElementById('stop').click()")
        browser.wait("document.getElementById('state').textContent === 'stopped'")
        assert browser.evaluate("window.pwned === undefined")
        assert other_problems(browser, served[1]) == []


@exhaustive
@needs("chromium")
def test_the_page_in_a_narrow_window(served):
    with Browser(400, 800, timeout=20) as browser:
        open_page(browser, served[1])
        browser.evaluate("other.click()")
        browser.wait("document.querySelectorAll('#history img').length === 1")
        assert browser.evaluate("document.documentElement.scrollWidth <= 400")
        assert browser.evaluate(
            "(b => b.width > 300 && b.right <= 400)(picture.getBoundingClientRect())"
        )


@exhaustive
@needs("chromium")
def test_another_sites_page_cannot_sample(served, tmp_path):
    page = tmp_path / "evil.html"
    page.write_text("<body data-ready=yes>")
    with Browser(timeout=20) as browser:
        browser.open(page)
        status = browser.evaluate(
            f"fetch('{served[1].url}sample', {{method: 'POST', mode: 'no-cors', body: "
            f"'{json.dumps(ASKED)}'}}).then(r => r.type, () => 'failed')"
        )
        assert status == "failed"  # not even an answer without its text
    connection = http.client.HTTPConnection("127.0.0.1", served[1].server_port)
    connection.request("POST", "/sample", json.dumps(ASKED), {"Origin": "null"})
    answer = connection.getresponse()
    assert answer.status == 403 and b"another page" in answer.read()
    connection.close()
    assert served[0]._jobs.empty() and served[0]._now is None
