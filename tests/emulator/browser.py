"""A headless Chromium for tests of pages, by the DevTools protocol over two pipes: no network, no
further package.

https://chromedevtools.github.io/devtools-protocol/: `Page`, `Runtime`, `Input`. The browser is
found by the variable CHROMIUM or on the path; Debian's package is `chromium`.
"""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}


def find_chromium():
    """The path of a Chromium, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless Chromium; a context manager."""

    def __init__(self, width=1440, height=900, dark=False, timeout=60.0):
        self.timeout, self.number, self.seen, self.buffer = timeout, 0, [], b""
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_child, self.out = os.pipe()
        self.into, from_child = os.pipe()

        def pipes():  # of the protocol, 3 and 4 in the child
            a, b = os.dup(to_child), os.dup(from_child)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [
                find_chromium(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-background-networking",
                "--hide-scrollbars",
                "--proxy-server=127.0.0.1:9",  # none: only this machine can be reached
                f"--user-data-dir={self.folder.name}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call(
            "Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(width, height)
        if dark:
            self.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": "dark"}],
            )

    session = None

    def call(self, method, **parameters):
        """The result of a method of the protocol; events that come before it are kept in `seen`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.seen.append(answer)

    def _receive(self):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.into], [], [], self.timeout)
            assert ready, "Chromium does not answer"
            data = os.read(self.into, 1 << 20)
            assert data, "Chromium has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, path, hash=""):
        """Show a file and wait until its film is there; returns the seconds that this took."""
        self.call("Page.navigate", url="about:blank")
        begun = time.perf_counter()
        self.call("Page.navigate", url=pathlib.Path(path).resolve().as_uri() + hash)
        self.wait("document.body && document.body.dataset.ready === 'yes'")
        return time.perf_counter() - begun

    def visit(self, address):
        """Show what a server on this machine has at an address; `wait` for what is to come."""
        self.call("Page.navigate", url=address)
        self.wait(
            f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'"
        )

    def wait(self, expression, seconds=None):
        """Wait until an expression holds in the page."""
        end = time.monotonic() + (seconds or self.timeout)
        while not self.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def evaluate(self, expression):
        """The value of a JavaScript expression, or of the promise that it is."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key, shift=False):
        code = KEYS.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                modifiers=8 * shift,
                **({"text": key} if not code and kind == "keyDown" else {}),
            )

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
                buttons=int(kind == "mousePressed"),
            )

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def problems(self):
        """What the page has reported: exceptions, errors of its log, requests other than for
        itself."""
        self.evaluate("0")
        found = []
        for event in self.seen:
            kind, what = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(
                    what["exceptionDetails"].get("exception", {}).get("description", str(what))
                )
            elif kind == "Log.entryAdded" and what["entry"]["level"] == "error":
                found.append(what["entry"]["text"])
            elif kind == "Network.requestWillBeSent" and what["request"]["url"].startswith("http"):
                found.append("requests " + what["request"]["url"])
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.out)
        os.close(self.into)
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()
