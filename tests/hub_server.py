"""A local server that speaks the part of the Hugging Face hub's API by which models are fetched."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"


@dataclass
class Repository:
    """One model: the folder of each revision; `private` answers as if it did not exist, `gated` shows names only."""

    revisions: dict[str, Path]
    private: bool = False
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The 40 hex digits of a branch or of a commit itself."""
        commits = {
            name: hashlib.sha1(str(folder).encode()).hexdigest() for name, folder in self.revisions.items()
        }
        return commits.get(revision, revision if revision in commits.values() else None)

    def folder(self, commit: str) -> Path:
        return next(folder for name, folder in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository]
    requests: list[str] = field(default_factory=list)  # "GET /acme/tiny/resolve/<commit>/config.json"
    status: int | None = None  # answer everything with it

    @property
    def files_asked_for(self) -> set[str]:
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.requests if "/resolve/" in path}


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub: Hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if hub.status is not None:
            return self.answer(hub.status, b"no service")
        if path.startswith("/storage/"):  # where the hub redirects to for large files
            return self.send_file(Path(path.removeprefix("/storage")))
        is_api = path.startswith("/api/models/")
        org, model, *rest = path.removeprefix("/api/models/" if is_api else "/").split("/")
        repository = hub.repositories.get(f"{org}/{model}")
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not known):
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        verb, revision, *file = rest or ["revision", "main"]
        commit = repository.commit(revision)
        if commit is None:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = repository.folder(commit)
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if is_api and verb == "revision":
            siblings = [{"rfilename": name} for name in names]
            return self.answer_json({"id": f"{org}/{model}", "sha": commit, "siblings": siblings})
        if is_api and verb == "tree":
            return self.answer_json([self.tree_entry(folder, name) for name in names])
        assert verb == "resolve", path
        if repository.gated and not known:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        name = "/".join(file)
        if name not in names:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit}
        if not name.endswith(".safetensors"):
            return self.send_file(folder / name, headers)
        content = (folder / name).read_bytes()
        storage = hub.url.replace("127.0.0.1", "localhost")  # another host, as at the real hub
        headers |= {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
        headers |= {"X-Linked-Size": str(len(content)), "Location": f"{storage}/storage{folder / name}"}
        return self.answer(302, b"", headers)

    def tree_entry(self, folder: Path, name: str) -> dict:
        content = (folder / name).read_bytes()
        entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if name.endswith(".safetensors"):
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entry |= {"lfs": lfs}
        return entry

    def send_file(self, file: Path, headers: dict[str, str] | None = None):
        content = file.read_bytes()
        self.answer(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'} | (headers or {}))

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
