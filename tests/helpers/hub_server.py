"""A hub on 127.0.0.1: the calls that huggingface-hub makes, files by range, and the ways in which servers fail."""

import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "mill/tiny"


class Hub:
    """folder: the repository's files. faults: callables (handler, name, start, stop) -> True when they answered themselves."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.faults = []
        self.requests = []  # (name, range or None, headers)
        self.served = 0
        self.lock = threading.Lock()
        self.endpoint = ""

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())

    def info(self):
        siblings = []
        for name in self.files():
            data = (self.folder / name).read_bytes()
            entry = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if name.endswith(".safetensors"):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "siblings": siblings}


def tree_entry(sibling):
    """The same as the call that lists a folder has it."""
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    lfs = sibling.get("lfs")
    return entry | ({"lfs": {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 130}} if lfs else {})


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag(name, data):
    return hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else git_hash(data)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [tree_entry(s) for s in self.hub.info()["siblings"]]
            return self.send(200, json.dumps(tree).encode(), body, {"Content-Type": "application/json"})
        if path.startswith(f"/api/models/{REPO}"):
            return self.send(200, json.dumps(self.hub.info()).encode(), body, {"Content-Type": "application/json"})
        match = re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)|/elsewhere/()(.+)", path)
        name = match and (match[2] or match[4])
        if not name or not (self.hub.folder / name).is_file() or match[1] not in (COMMIT, None):
            return self.send(404, b"not found", body, {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"})
        data = (self.hub.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        with self.hub.lock:
            self.hub.requests.append((name, asked and asked[0], path, dict(self.headers)))
        start, stop = (int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))) if asked else (0, len(data))
        if body and any(fault(self, name, start, stop) for fault in list(self.hub.faults)):
            return None
        headers = {"ETag": f'"{etag(name, data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.send(206 if asked else 200, data[start:stop], body, headers)

    def send(self, status, data, body=True, headers=None, length=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if body:
            self.wfile.write(data)
            with self.hub.lock:
                self.hub.served += len(data)


@contextmanager
def serving(folder):
    """A hub with the files of a folder, at `.endpoint`; closed at the end."""
    hub = Hub(folder)
    handler = type("Bound", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def part(handler, name, start, stop, count, total=None, claim=None):
    """Answers a range with `count` of its bytes, though the header promises all, and closes the connection."""
    data = (handler.hub.folder / name).read_bytes()
    handler.send_response(206)
    handler.send_header("Content-Range", claim or f"bytes {start}-{stop - 1}/{total or len(data)}")
    handler.send_header("Content-Length", str(stop - start))
    handler.end_headers()
    handler.wfile.write(data[start : start + count])
    handler.wfile.flush()
    handler.close_connection = True
    return True


def dropping(every):
    """Every so many-th answer breaks off in the middle."""
    state = {"n": 0}

    def fault(handler, name, start, stop):
        if stop - start < 8:
            return False
        state["n"] += 1
        return state["n"] % every == 1 and part(handler, name, start, stop, (stop - start) // 2)

    return fault


def once(status, headers=None):
    """The first request of each range fails with this status."""
    seen = set()

    def fault(handler, name, start, stop):
        if (name, start, stop) in seen:
            return False
        seen.add((name, start, stop))
        handler.send(status, b"busy", headers=headers)
        return True

    return fault


def slow(handler, name, start, stop):
    """Byte by byte at first."""
    data = (handler.hub.folder / name).read_bytes()[start:stop]
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{(handler.hub.folder / name).stat().st_size}")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for i in range(4):
        handler.wfile.write(data[i : i + 1])
        handler.wfile.flush()
        time.sleep(0.01)
    handler.wfile.write(data[4:])
    return True
