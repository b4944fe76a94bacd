"""A hub on 127.0.0.1: the calls that huggingface-hub makes, files by range, and the ways in which servers fail."""

import base64
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
    """folder: the repository's files. faults: callables (handler, name, start, stop) -> True when they answered themselves.

    What is uploaded: `created` (what the repository was made with; None: it was there), `commits` (names of the files of each),
    `received` (names or digests of all contents that came over the wire); `refuse`: called with a digest before a large file is
    taken, True breaks the connection. token: what writing needs.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.faults = []
        self.requests = []  # (name, range or None, headers)
        self.served = 0
        self.lock = threading.Lock()
        self.endpoint = ""
        self.created = None
        self.exists = True
        self.commits, self.received, self.objects = [], [], {}
        self.refuse = lambda digest: False
        self.token = "hf_secret"
        self.private = False

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())

    def info(self):
        siblings = []
        for name in self.files():
            data = (self.folder / name).read_bytes()
            entry = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if is_large(name):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {
            "id": REPO,
            "modelId": REPO,
            "sha": COMMIT,
            "private": self.private,
            "tags": [],
            "downloads": 0,
            "siblings": siblings,
        }


def tree_entry(sibling):
    """The same as the call that lists a folder has it."""
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    lfs = sibling.get("lfs")
    return entry | ({"lfs": {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 130}} if lfs else {})


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag(name, data):
    return hashlib.sha256(data).hexdigest() if is_large(name) else git_hash(data)


def is_large(name):
    """Whether git-lfs has the file."""
    return name.endswith((".safetensors", ".gguf", ".imatrix"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def do_POST(self):
        path, data = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}" and path != "/api/validate-yaml":
            return self.send(401, b"no")
        if path == "/api/validate-yaml":
            return self.send_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            self.hub.created, self.hub.exists = json.loads(data), True
            self.hub.private = self.hub.created.get("private") or self.hub.created.get("visibility") == "private"
            return self.send_json({"url": f"{self.hub.endpoint}/{REPO}", "name": REPO})
        if path == f"/api/models/{REPO}/preupload/main":
            asked = json.loads(data)["files"]
            modes = [(f["path"], "lfs" if is_large(f["path"]) else "regular") for f in asked]
            return self.send_json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]})
        if path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                entry | {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{entry['oid']}"}}}
                for entry in json.loads(data)["objects"]
            ]
            return self.send_json({"transfer": "basic", "objects": objects})
        if path == f"/api/models/{REPO}/commit/main":
            return self.commit([json.loads(line) for line in data.splitlines()])
        return self.send(404, b"not found")

    def do_PUT(self):
        data, digest = self.rfile.read(int(self.headers["Content-Length"])), self.path.rpartition("/")[2]
        if self.hub.refuse(digest):
            return self.send(403, b"broken")
        self.hub.received.append(digest)
        self.hub.objects[digest] = data
        return self.send(200 if hashlib.sha256(data).hexdigest() == digest else 400, b"")

    def commit(self, lines):
        names = []
        for line in lines[1:]:
            value = line["value"]
            small = line["key"] == "file"
            content = base64.b64decode(value["content"]) if small else self.hub.objects[value["oid"]]
            (self.hub.folder / value["path"]).write_bytes(content)
            self.hub.received += [value["path"]] * small
            names.append(value["path"])
        self.hub.commits.append(names)
        self.send_json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.endpoint}/{REPO}/commit/{COMMIT}"})

    def send_json(self, value):
        self.send(200, json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def answer(self, body):
        path = unquote(urlsplit(self.path).path)
        if not self.hub.exists:
            return self.send(404, b"not found", body, {"X-Error-Code": "RepoNotFound"})
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
