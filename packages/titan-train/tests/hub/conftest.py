"""A server on loopback that speaks the hub's protocol, and counts the bytes it sends."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the server holds and did."""

    files: dict = field(default_factory=dict)
    endpoint: str = ""
    sent: dict = field(default_factory=dict)
    """Bytes sent of each file."""
    ranges: list = field(default_factory=list)
    break_after: int = 0
    """Break the transfer of a large file off at this byte of it."""
    corrupt: bool = False
    listed: tuple = ()
    """Further names in the listing."""

    def info(self):
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            one = {"rfilename": name, "size": len(content), "blobId": blob}
            if len(content) > 1000:
                one["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            siblings.append(one)
        siblings += [{"rfilename": name, "size": 1, "blobId": "0" * 40} for name in self.listed]
        return {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        hub = self.server.hub
        path = self.path.split("?")[0]
        if re.fullmatch(r"/api/(models|datasets)/org/name(/revision/[^/]+)?", path):
            revision = path.split("/revision/")[1] if "/revision/" in path else "main"
            if revision not in ("main", COMMIT):
                return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            return self.reply(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, body)
        found = re.fullmatch(rf"(?:/datasets)?/org/name/resolve/{COMMIT}/(.+)", path)
        if found and found[1] in hub.files:
            return self.send_file(hub, found[1], body)
        if path.startswith("/api/models/org/gated"):
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        if path.startswith("/api/"):
            return self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)

    def send_file(self, hub, name, body):
        content = hub.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        if asked := self.headers.get("Range"):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            hub.ranges.append((name, start))
        part = content[start:]
        if hub.corrupt and len(content) > 1000:
            part = part[:-1] + bytes([part[-1] ^ 1])
        if body and hub.break_after and len(content) > 1000:
            self.head(status, headers, len(part))
            self.wfile.write(part[: max(0, hub.break_after - start)])
            self.wfile.flush()
            hub.sent[name] = hub.sent.get(name, 0) + max(0, hub.break_after - start)
            self.close_connection = True
            self.connection.close()
            return None
        if body:
            hub.sent[name] = hub.sent.get(name, 0) + len(part)
        return self.reply(status, part, headers, body)

    def head(self, status, headers, length):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(key, value)
        self.end_headers()

    def reply(self, status, content, headers, body):
        self.head(status, headers, len(content))
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub(endpoint=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.hub
    server.shutdown()
    server.server_close()
    thread.join()
