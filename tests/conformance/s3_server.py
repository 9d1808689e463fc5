"""An S3 server for tests: moto's, in a child process, that fails a request when told to."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}

SERVER = """
import sys, socket, threading
from urllib.parse import parse_qs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

armed, lock = [], threading.Lock()
moto = DomainDispatcherApplication(create_backend_app)

def answer(environ, start_response):
    path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    if path == "/-/fail":
        with lock:
            armed.append({k: v[0] for k, v in parse_qs(environ["QUERY_STRING"]).items()})
        start_response("204 No Content", [])
        return []
    if path == "/-/left":
        with lock:
            left, armed[:] = len(armed), []
        start_response("200 OK", [("Content-Length", str(len(str(left))))])
        return [str(left).encode()]
    with lock:
        hit = next((f for f in armed if f["method"] == method and f["path"] in path), None)
        if hit:
            armed.remove(hit)
    if not hit:
        return moto(environ, start_response)
    # What was sent must be read, or the client sees a broken connection instead of an answer.
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if hit["how"] == "cut":
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return []
    start_response(hit["how"] + " Error", [("Content-Length", "0")])
    return []

class KeepAlive(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    def log(self, *args):
        pass

server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=KeepAlive)
server.daemon_threads = True
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


class S3Server:
    """The server's address, and the calls that tests make past the tier."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._client: Any = None

    @property
    def client(self) -> Any:
        """A boto3 client: other code than obstore's."""
        if self._client is None:
            import boto3

            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                region_name=REGION,
                aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            )
        return self._client

    def new_bucket(self) -> str:
        name = f"zinf-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=name)
        return name

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def get(self, bucket: str, name: str) -> bytes:
        return self.client.get_object(Bucket=bucket, Key=name)["Body"].read()

    def fail_next(self, method: str, path: str, how: str = "500") -> None:
        """Fail the next request of `method` whose path holds `path`: an HTTP status, or "cut"."""
        self._control(f"fail?method={method}&path={path}&how={how}")

    def num_left(self) -> int:
        """Return how many failures did not happen, and drop them."""
        return int(self._control("left"))

    def _control(self, what: str) -> bytes:
        with urllib.request.urlopen(f"{self.endpoint}/-/{what}", timeout=30) as response:
            return response.read()


@contextmanager
def served() -> Iterator[S3Server]:
    """Start a server; it ends with the block, or with this process if that is killed."""
    command = [sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as child:
        try:
            yield S3Server(int(child.stdout.readline()))
        finally:
            child.kill()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Return a server that lives as long as this worker of the test run."""
    pytest.importorskip("moto")
    with served() as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let obstore find the server's credentials, and nobody else's, in the environment."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
