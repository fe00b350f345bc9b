"""A small HTTP server for the project's own pages, on the standard library's `http.server`.

    with Server(routes, host, port) as server:
        print(server.url)
        server.serve_forever()

routes: {("GET", "/"): function}. A function takes a `Request` and returns an `Answer`, or a
`Stream`; it raises `Refusal` for a request that it does not accept. Only these paths exist: nothing
of the file system is reachable.

A page on another site must not reach the server through the reader's browser. Two checks see to it:

- Host must be an address, `localhost`, or this machine's name: a name of another site that resolves
  to this address (DNS rebinding) is refused.
- Origin, if a browser sends it, must be that Host, and Sec-Fetch-Site must not be another site: a
  form or script of another page is refused (CSRF).

A connection serves one request, in a thread; there are at most CONNECTIONS of them, and one that
sends nothing is closed after TIMEOUT seconds.
"""

import dataclasses
import errno
import http.server
import ipaddress
import json
import re
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterable

from ...errors import NumdiffError, printable

CONNECTIONS = 64
TIMEOUT = 20  # seconds
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]{1,5})?")
BODY = 1 << 16  # bytes of a request's body, at most
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


class Refusal(Exception):
    """A request is refused: status, a number of HTTP from 400 to 599, and a sentence."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


@dataclasses.dataclass
class Request:
    """query: {name: its first value}; body: what a POST sent."""

    path: str
    query: dict
    body: bytes


@dataclasses.dataclass
class Answer:
    """A whole answer."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200


@dataclasses.dataclass
class Stream:
    """Server-sent events. events: of bytes, each a whole event; closed: called when no more are
    sent, also where the browser has gone."""

    events: Iterable
    closed: Callable = lambda: None


def json_answer(value, status=200):
    """An `Answer` of JSON."""
    return Answer(json.dumps(value).encode(), "application/json", status)


def event(name, value):
    """A server-sent event: its name, and a value as JSON."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()


class Server(http.server.ThreadingHTTPServer):
    """Serves `routes`. host: the address to listen on; port: 0 for a free one.

    Raises a `NumdiffError` where the port is in use, or the address is not this machine's."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, routes, host="127.0.0.1", port=0):
        self.routes, self.host = routes, host
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise NumdiffError(why_not_bound(host, port, error)) from error

    def server_bind(self):  # the standard one looks up a name, which may take seconds
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = self.host, self.server_address[1]

    @property
    def url(self):
        """Where a browser of this machine finds the page."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    @property
    def local(self):
        """Whether no other machine reaches the server."""
        return is_loopback(self.host)

    def process_request(self, request, client_address):
        if not self._free.acquire(blocking=False):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def _refuse(self, request):
        text = b"This server has too many open connections: close some pages, and try again.\n"
        head = (
            "HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        try:
            request.settimeout(1)
            request.sendall(head.encode() + text)
        except OSError:
            pass
        self.shutdown_request(request)

    def handle_error(self, request, client_address):
        """A connection that breaks is no error of this server; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(printable(f"note      a request failed: {error!r}"), file=sys.stderr, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server_version, sys_version = "numdiff", ""
    timeout = TIMEOUT

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except UnicodeError:  # a request line, or a header, that is no text
            self.close_connection = True

    def __getattr__(self, name):  # of each method, also those that HTTP does not have
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def log_message(self, *_):
        """Requests are not logged."""

    def send_error(self, code, message=None, explain=None):
        """What the standard library finds wrong with a request is the client's error."""
        code = {505: 400, 501: 405}.get(code, code)
        self._send(text_answer(code, "This is no request that the server understands."))

    def _answer(self):
        try:
            answer = self._route()
        except Refusal as refusal:
            answer = text_answer(refusal.status, str(refusal))
        except NumdiffError as error:
            answer = text_answer(500, str(error))
        if isinstance(answer, Stream):
            self._stream(answer)
        else:
            self._send(answer)

    def _route(self):
        check_host(self.headers.get_all("Host") or [], self.server.host)
        check_origin(self.headers, self.command)
        target = urllib.parse.urlsplit(self.path)
        path = target.path
        if target.scheme or target.netloc:
            raise Refusal(400, "The request must name a path, and not a whole address.")
        function = self.server.routes.get((self.command, path))
        if function is None:
            if any(known == path for _, known in self.server.routes):
                raise Refusal(405, "This page does not take requests of this method.")
            raise Refusal(404, "There is no such page.")
        try:
            query = urllib.parse.parse_qs(target.query, max_num_fields=16, errors="strict")
        except ValueError:
            raise Refusal(400, "The query of the address cannot be read.") from None
        return function(
            Request(path, {name: values[0] for name, values in query.items()}, self._body())
        )

    def _body(self):
        if self.command != "POST":
            return b""
        if self.headers.get("Transfer-Encoding"):
            raise Refusal(411, "The request must say how long it is.")
        length = self.headers.get_all("Content-Length") or [""]
        if len(length) != 1 or not (length[0].isascii() and length[0].isdecimal()):
            raise Refusal(411, "The request must say how long it is.")
        if len(length[0]) > 9 or int(length[0]) > BODY:
            raise Refusal(413, f"The request has more than {BODY:,} bytes.")
        body = self.rfile.read(int(length[0]))
        if len(body) != int(length[0]):
            raise Refusal(400, "The request is shorter than it says.")
        return body

    def _head(self, status, kind, length=None):
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            *([] if length is None else [("Content-Length", str(length))]),
        ):
            self.send_header(name, value)
        self.end_headers()

    def _send(self, answer):
        self.close_connection = True
        self._head(answer.status, answer.kind, len(answer.body))
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _stream(self, stream):
        self.close_connection = True
        try:
            self._head(200, "text/event-stream")
            for part in stream.events:
                self.wfile.write(part)
                self.wfile.flush()
        finally:
            stream.closed()


def text_answer(status, sentence):
    return Answer(f"{printable(sentence)}\n".encode(), "text/plain; charset=utf-8", status)


def check_host(hosts, bound):
    """Raise a `Refusal` unless the Host of a request is one that no other site can have."""
    name = split_host(hosts[0]) if len(hosts) == 1 else None
    if name is None:
        raise Refusal(400, "The request must name one host.")
    if name.casefold() == "localhost":
        return
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        address = None
    local = is_loopback(bound)
    if address is not None and (address.is_loopback or not local):
        return
    if not local and name.casefold() in (socket.gethostname().casefold(), bound.casefold()):
        return
    raise Refusal(
        403,
        "This server does not answer under that host name: open the address that it has printed.",
    )


def split_host(text):
    """The host of host:port, without brackets; None if it is not of that form."""
    if not HOST.fullmatch(text):
        return None
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        parts.port  # noqa: B018 (raises a ValueError)
    except ValueError:
        return None
    return parts.hostname if parts.netloc == text and "@" not in text else None


def is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.casefold() == "localhost"


def check_origin(headers, command):
    """Raise a `Refusal` for a request that a page of another origin has caused."""
    origin = headers.get("Origin")
    host = headers.get("Host")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise Refusal(403, "This request comes from another page, and is refused.")
    followed = command == "GET" and headers.get("Sec-Fetch-Mode") == "navigate"  # a link
    if not followed and headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise Refusal(403, "This request comes from another page, and is refused.")


def why_not_bound(host, port, error):
    """The sentence for an address on which the server cannot listen."""
    if isinstance(error, OverflowError):
        return f"port {port} does not exist: give a --port from 0 to 65535."
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: end the program that has it, or give another --port (0 takes a free one)."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} is reserved for the system's services: give a --port of 1024 or above."
    reason = error.strerror or str(error)
    return f"cannot listen on {host}, port {port} ({reason}): give an address of this machine as --host."
