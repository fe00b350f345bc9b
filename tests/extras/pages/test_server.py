"""The server of the pages: requests of other sites, malformed ones, and files outside of a page."""

import http.client
import socket
import threading

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.pages import server as server_module
from numdiff.extras.pages.live import LiveReport
from numdiff.extras.pages.server import (
    Answer,
    Server,
    Stream,
    check_host,
    event,
    json_answer,
    split_host,
)
from tests.extras.pages.folders import make_run, report_steps


@pytest.fixture
def serve():
    """serve(routes) -> a running `Server`, ended with the test."""
    running = []

    def start(routes, **more):
        server = Server(routes, **more)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server, path="/", method="GET", headers=(), body=None):
    """(status, body) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(server, data):
    """What the server answers to bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        found = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except OSError:  # it answered before it had read all
            pass
        return found


def echo_routes():
    return {
        ("GET", "/"): lambda request: Answer(b"page"),
        ("POST", "/echo"): lambda request: json_answer(request.body.decode("latin-1")),
    }


@pytest.mark.parametrize(
    "host, bound, allowed",
    [
        ("localhost:80", "127.0.0.1", True),
        ("127.0.0.1:9000", "127.0.0.1", True),
        ("[::1]:80", "127.0.0.1", True),
        ("evil.com", "127.0.0.1", False),
        ("localhost.evil.com", "127.0.0.1", False),
        ("127.0.0.1.evil.com", "127.0.0.1", False),
        ("192.168.0.7", "127.0.0.1", False),
        ("192.168.0.7", "0.0.0.0", True),
        ("evil.com", "0.0.0.0", False),
        (socket.gethostname(), "0.0.0.0", True),
        ("", "127.0.0.1", False),
        ("a@localhost", "127.0.0.1", False),
        ("localhost/x", "127.0.0.1", False),
        ("localhost:x", "127.0.0.1", False),
        ("[::1].evil.com", "127.0.0.1", False),
        ("[::1]x:80", "127.0.0.1", False),
        ("127.0.0.1:80:80", "127.0.0.1", False),
    ],
)
def test_hosts(host, bound, allowed):
    if allowed:
        check_host([host], bound)
        return
    with pytest.raises(server_module.Refusal) as refused:
        check_host([host], bound)
    assert refused.value.status in (400, 403)


def test_two_hosts_or_none():
    for hosts in ([], ["localhost", "localhost"]):
        with pytest.raises(server_module.Refusal):
            check_host(hosts, "127.0.0.1")
    assert split_host("a:1") == "a" and split_host("[::1]") == "::1"


def test_other_origins_are_refused(serve):
    server = serve(echo_routes())
    own = f"http://127.0.0.1:{server.server_port}"
    assert ask(server) == (200, b"page")
    assert ask(server, "/echo", "POST", {"Origin": own}, b"hi") == (200, b'"hi"')
    for headers in (
        {"Host": "evil.com"},
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
    ):
        assert ask(server, "/echo", "POST", headers, b"hi")[0] == 403
    # a link on another page leads here
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(server, "/", headers=link)[0] == 200
    assert ask(server, "/", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def malformed(count, rng):
    """Requests with one fault each, and random bytes."""
    good = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
    fixed = [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n",
        b"GET http://evil.com/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET //evil.com/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /[ HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /x?" + b"a=1&" * 100 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        good.replace(b": 2", b": -2"),
        good.replace(b": 2", b": 2000000000000"),
        good.replace(b": 2", b": 0x2"),
        good.replace(b": 2", b": 9"),
        good.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        good.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3"),
        good.replace(b"/echo", b"/"),
        good.replace(b"POST", b"DELETE"),
    ]
    yield from fixed
    for _ in range(count - len(fixed)):
        data = bytearray(good)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(0, 40)] = rng.integers(0, 256)
        yield bytes(data)


def test_malformed_requests(serve, capfd):
    """Of 300 no one is answered by 5xx or a traceback, and the server then serves as before."""
    server = serve(echo_routes())
    allowed = (b"200", b"400", b"403", b"404", b"405", b"408", b"411", b"413", b"414", b"431")
    for data in malformed(300, np.random.default_rng(0)):
        answer = raw(server, data)
        if answer.startswith(b"HTTP/"):
            assert answer.split()[1] in allowed, (data, answer)
        assert b"root:" not in answer and b"Traceback" not in answer
    assert ask(server) == (200, b"page")
    assert capfd.readouterr().err == ""


def test_a_busy_port_is_one_sentence(serve):
    server = serve(echo_routes())
    with pytest.raises(NumdiffError, match=rf"port {server.server_port} is in use: .* --port"):
        Server({}, port=server.server_port)
    with pytest.raises(
        NumdiffError, match=r"cannot listen on 203\.0\.113\.1, port \d+ \([A-Z][a-z ]+\): give"
    ):
        Server({}, "203.0.113.1")
    with pytest.raises(NumdiffError, match="give an address of this machine"):
        Server({}, "no such host")
    with pytest.raises(NumdiffError, match="port 70000 does not exist: give a --port from 0"):
        Server({}, port=70000)


def test_connections_are_bounded(serve, monkeypatch):
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)
    monkeypatch.setattr(server_module.Handler, "timeout", 0.3)
    server = serve(echo_routes())
    idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(2)]
    while server._free._value:  # until both are accepted
        pass
    answer = raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not answer or b"503" in answer  # a reset may overtake the sentence
    for connection in idle:  # which are closed when they have sent nothing for a while
        assert connection.recv(100) == b""
        connection.close()
    while server._free._value < 2:
        pass
    assert ask(server) == (200, b"page")


def test_a_closed_browser_ends_its_stream(serve):
    ended = threading.Event()

    def forever():
        while True:
            yield event("tick", 1)

    server = serve({("GET", "/events"): lambda request: Stream(forever(), ended.set)})
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"text/event-stream" in connection.recv(1 << 12)
    assert ended.wait(20)


def test_the_live_report(serve, tmp_path):
    run_dir = make_run(tmp_path, steps=20, planned=40, grids=(20,))
    (tmp_path / "secret.png").write_bytes(b"secret")
    server = serve(LiveReport([run_dir]).routes)
    status, text = ask(server)
    assert status == 200 and b'"live": true' in text
    status, found = ask(server, "/grid?run=0&step=20")
    assert status == 200 and found == (run_dir / "samples-00000020.png").read_bytes()
    for query, status in {
        "run=0&step=30": 404,
        "run=1&step=20": 404,
        "run=0": 400,
        "run=0&step=../../secret": 400,
        "run=0&step=%00": 400,
        "run=-1&step=20": 400,
        "run=0&step=%D9%A2": 400,
    }.items():
        assert ask(server, f"/grid?{query}")[0] == status
    before = ask(server, "/data")[1]
    assert b'"step": 20' in before
    report_steps(run_dir, 20, 40, 10)
    (run_dir / "samples-00000040.png").symlink_to(tmp_path / "secret.png")
    after = ask(server, "/data")[1]
    assert b'"step": 40' in after and len(after) > len(before)
    assert ask(server, "/grid?run=0&step=40")[0] == 404  # a link, which leads elsewhere
