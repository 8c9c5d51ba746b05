"""A chat endpoint on this machine that answers by a script: replies, refusals, delays, broken connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Response:
    """What to send back. text: a well-formed reply's; body: sent as it is instead; hang_up: send half of it and go."""

    text: str = ""
    status: int = 200
    body: str | None = None
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    hang_up: bool = False


@dataclass(slots=True)
class Endpoint:
    """A running server. seen: request bodies in order of arrival; keys: what came as API key; most_at_once: requests
    that were in flight together."""

    url: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


Script = Callable[[str, int], Response]
"""(the user message, how often it came before) -> response."""


def soon(status: int) -> Response:
    """A refusal that may be tried again at once."""
    return Response(status=status, body='{"error": {"message": "later"}}', headers={"retry-after-ms": "5"})


@contextmanager
def serve(script: Script) -> Iterator[Endpoint]:
    """Run the server while the block lasts."""
    endpoint = Endpoint("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server looks for
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            question = body["messages"][-1]["content"]
            with endpoint.lock:
                before = sum(earlier["messages"][-1]["content"] == question for earlier in endpoint.seen)
                endpoint.seen.append({**body, "path": self.path})
                endpoint.keys.append(self.headers["authorization"])
                endpoint.in_flight += 1
                endpoint.most_at_once = max(endpoint.most_at_once, endpoint.in_flight)
            response = script(question, before)
            time.sleep(response.delay)
            with endpoint.lock:
                endpoint.in_flight -= 1
            self.reply(response)

        def reply(self, response: Response) -> None:
            message = {"role": "assistant", "content": response.text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
            data = (json.dumps(whole) if response.body is None else response.body).encode()
            try:
                self.send_response(response.status)
                self.send_header("content-type", response.content_type)
                self.send_header("content-length", str(len(data)))
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if response.hang_up else data)
            except (BrokenPipeError, ConnectionResetError):  # a client that waited no longer
                pass
            if response.hang_up:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
