"""A Hugging Face Hub on this machine: the part of its HTTP API that huggingface_hub uses to create
a model's repository, commit files to it, and download them. It keeps every request."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass(kw_only=True)
class Stored:
    """A repository: its files by commit, the last commit being that of `main`."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def main(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        told = [message, str(len(self.commits)), *sorted(files)]
        sha = hashlib.sha1("\n".join(told).encode()).hexdigest()
        self.commits[sha] = files
        return sha


@dataclass(kw_only=True)
class Hub:
    """What is stored, and what was asked for: method, path and body of each request."""

    endpoint: str = ""
    repositories: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)  # of large files, by SHA-256
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    forbidden: set[str] = field(default_factory=set)  # owners whom the token may not write for

    def add(self, name: str, files: dict[str, bytes], gated: bool = False) -> str:
        """Store a repository with one commit; its id."""
        self.repositories[name] = Stored(gated=gated)
        return self.repositories[name].commit(files, "first")

    def asked(self, method: str, part: str = "") -> list[str]:
        """The paths of requests by a method that contain `part`."""
        return [path for verb, path, _ in self.requests if verb == method and part in path]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", said: str = "") -> None:
        self.status, self.code, self.said = status, code, said


def _etag(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, body))
        try:
            if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
                raise Refused(401, said="Invalid credentials in Authorization header")
            self._route(path, body)
        except Refused as refused:
            told = {"X-Error-Code": refused.code, "X-Error-Message": refused.said}
            self._send(b"{}", refused.status, {key: text for key, text in told.items() if text})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _route(self, path: str, body: bytes) -> None:
        words = [unquote(word) for word in path.strip("/").split("/")]
        match words:
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "models", owner, name, *rest]:
                self._model(f"{owner}/{name}", rest, body)
            case ["uploads", sha256]:
                assert hashlib.sha256(body).hexdigest() == sha256
                self.hub.uploads[sha256] = body
                self._send(b"")
            case [owner, name, "info", "lfs", "objects", "batch"]:
                self._batch(f"{owner}/{name.removesuffix('.git')}", json.loads(body))
            case [owner, name, "resolve", revision, *file]:
                self._file(f"{owner}/{name}", revision, "/".join(file))
            case _:
                raise Refused(404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        self._require_token(name)
        if name in self.hub.repositories:
            return self._json({"url": f"{self.hub.endpoint}/{name}"}, 409)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.repositories[name] = Stored(private=private)
        self.hub.repositories[name].commit({".gitattributes": b""}, "initial commit")
        return self._json({"url": f"{self.hub.endpoint}/{name}"})

    def _model(self, name: str, rest: list[str], body: bytes) -> None:
        stored = self._stored(name)
        if rest[:1] == ["preupload"]:
            self._require_token(name)
            mode = {True: "lfs", False: "regular"}
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": mode[file["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": modes})
        if rest[:1] == ["commit"]:
            self._require_token(name)
            return self._commit(name, stored, [json.loads(line) for line in body.splitlines()])
        sha = self._revision(stored, rest[1] if len(rest) > 1 else "main")
        files = stored.commits[sha]
        if rest[:1] == ["tree"]:
            return self._json([self._entry(path, content) for path, content in files.items()])
        siblings = [{"rfilename": path, "size": len(files[path])} for path in files]
        about = {"id": name, "sha": sha, "private": stored.private, "gated": False, "tags": []}
        return self._json(about | {"siblings": siblings})

    @staticmethod
    def _entry(path: str, content: bytes) -> dict[str, Any]:
        size = len(content)
        entry = {"type": "file", "path": path, "size": size, "oid": _etag(content)}
        if path.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
        return entry

    def _batch(self, name: str, asked: dict[str, Any]) -> None:
        self._require_token(name)
        objects = []
        for one in asked["objects"]:
            upload = {"href": f"{self.hub.endpoint}/uploads/{one['oid']}", "header": {}}
            actions = {} if one["oid"] in self.hub.uploads else {"actions": {"upload": upload}}
            objects.append(one | actions)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, stored: Stored, lines: list[dict[str, Any]]) -> None:
        files, message = dict(stored.commits[stored.main]), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400)
        sha = stored.commit(files, message)
        url = f"{self.hub.endpoint}/{name}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url})

    def _file(self, name: str, revision: str, file: str) -> None:
        stored = self._stored(name)
        sha = self._revision(stored, revision)
        content = stored.commits[sha].get(file)
        if content is None:
            raise Refused(404, "EntryNotFound")
        if stored.gated and self.headers.get("Authorization") is None:
            raise Refused(403, "GatedRepo")
        self._send(content, headers={"X-Repo-Commit": sha, "ETag": f'"{_etag(content)}"'})

    def _stored(self, name: str) -> Stored:
        stored = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") is not None
        if stored is None or (stored.private and not allowed):  # the Hub does not tell which
            raise Refused(404 if allowed else 401, "RepoNotFound")
        return stored

    def _revision(self, stored: Stored, revision: str) -> str:
        if revision == "main":
            return stored.main
        if revision not in stored.commits:
            raise Refused(404, "RevisionNotFound")
        return revision

    def _require_token(self, name: str) -> None:
        if self.headers.get("Authorization") is None:
            raise Refused(401)
        if name.split("/")[0] in self.hub.forbidden:
            raise Refused(403, said="You don't have the rights to create a model there")

    def _json(self, content: Any, status: int = 200) -> None:
        told = {"Content-Type": "application/json"}
        self._send(json.dumps(content).encode(), status, told)

    def _send(
        self, content: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve() -> Iterator[Hub]:
    """A Hub, empty, while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
