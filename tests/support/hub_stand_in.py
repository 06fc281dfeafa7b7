"""A Hugging Face Hub on this machine: the part of its HTTP API that huggingface_hub uses to create
a model's repository, commit files to it, and download them. It records every request."""

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
    """A repository: its files by commit, `main` is the last commit."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def main(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        lines = [message, str(len(self.commits)), *sorted(files)]
        sha = hashlib.sha1("\n".join(lines).encode()).hexdigest()
        self.commits[sha] = files
        return sha


@dataclass(kw_only=True)
class Hub:
    """The repositories, and the method, path and body of each request."""

    endpoint: str = ""
    repositories: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)  # of large files, by SHA-256
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    forbidden: set[str] = field(default_factory=set)  # owners whom the token may not write for

    def add(self, name: str, files: dict[str, bytes], gated: bool = False) -> str:
        """Store a repository with one commit; its id."""
        self.repositories[name] = Stored(gated=gated)
        return self.repositories[name].commit(files, "first")

    def requested(self, method: str, fragment: str = "") -> list[str]:
        """The paths of requests by a method that contain `fragment`."""
        return [path for verb, path, _ in self.requests if verb == method and fragment in path]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


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
                raise Refused(401, message="Invalid credentials in Authorization header")
            self._route(path, body)
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(b"{}", refused.status, {key: text for key, text in headers.items() if text})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _route(self, path: str, body: bytes) -> None:
        words = [unquote(word) for word in path.strip("/").split("/")]
        match words:
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "models", owner, name, *subpath]:
                self._model(f"{owner}/{name}", subpath, body)
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

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        self._require_token(name)
        if name in self.hub.repositories:
            return self._json({"url": f"{self.hub.endpoint}/{name}"}, 409)
        private = request.get("private") is True or request.get("visibility") == "private"
        self.hub.repositories[name] = Stored(private=private)
        self.hub.repositories[name].commit({".gitattributes": b""}, "initial commit")
        return self._json({"url": f"{self.hub.endpoint}/{name}"})

    def _model(self, name: str, subpath: list[str], body: bytes) -> None:
        stored = self._stored(name)
        if subpath[:1] == ["preupload"]:
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
        if subpath[:1] == ["commit"]:
            self._require_token(name)
            return self._commit(name, stored, [json.loads(line) for line in body.splitlines()])
        sha = self._revision(stored, subpath[1] if len(subpath) > 1 else "main")
        files = stored.commits[sha]
        if subpath[:1] == ["tree"]:
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

    def _batch(self, name: str, request: dict[str, Any]) -> None:
        self._require_token(name)
        objects = []
        for file in request["objects"]:
            upload = {"href": f"{self.hub.endpoint}/uploads/{file['oid']}", "header": {}}
            actions = {} if file["oid"] in self.hub.uploads else {"actions": {"upload": upload}}
            objects.append(file | actions)
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
            raise Refused(403, message="You don't have the rights to create a model there")

    def _json(self, content: Any, status: int = 200) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(json.dumps(content).encode(), status, headers)

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
    """Serve an empty Hub while the context is open."""
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
