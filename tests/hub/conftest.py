"""A hub on 127.0.0.1 that speaks what the two clients ask, and caches that are thrown away."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "1" * 40
ROWS = b'{"query": "Who are you?", "response": "I am small.", "tag": "en"}\n'
PLURAL = {"models": "model", "datasets": "dataset"}


def safetensors_bytes(size_bytes: int = 4096) -> bytes:
    """A file with one float32 tensor of zeros."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [size_bytes // 4], "data_offsets": [0, size_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size_bytes)


def model_files(**config: object) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"model_type": "llama", **config}).encode(),
        "model.safetensors": safetensors_bytes(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"tokenizer_class": "TokenizersBackend"}',
        "pytorch_model.bin": b"pickled",
    }


class LoopbackHub(ThreadingHTTPServer):
    """Repositories in memory, under both services' addresses.

    Attributes:
        repos: (kind, id) -> file name -> content.
        private: ids that need the token "secret".
        gated: ids that nobody may read.
        cut: file name -> how many more times its connection is dropped in the middle.
        log: "METHOD path" of every request.
        uploaded: (kind, id) -> file name -> content, as committed.
        blobs: SHA-256 -> content that was sent ahead of its commit.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {
            ("model", "org/small"): model_files(), ("dataset", "org/rows"): {"train.jsonl": ROWS, "README.md": b"rows"}}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.log: list[str] = []
        self.uploaded: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for."""
        names = [re.search(r"(?:FilePath=|/resolve/[^/]+/)([^&]+)", line) for line in self.log if line.startswith("GET")]
        return sorted({unquote(match[1]) for match in names if match})


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        self.server.log.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
        for pattern, answer in self._routes():
            match = re.fullmatch(pattern, path)
            if match:
                answer(match, query, body)
                return
        self._json(404 if path.startswith("/api") else 200, {"error": "no such address", "Message": "no such address"})

    def _routes(self) -> list:
        name = r"([\w.-]+/[\w.-]+)"
        return [
            (rf"/api/v1/(models|datasets)/{name}/repo/(?:files|tree)", self._ms_listing),
            (rf"/api/v1/(models|datasets)/{name}/repo", self._ms_file),
            (rf"/api/(models|datasets)/{name}/revision/(\w+)", self._hf_info),
            (rf"/api/(models|datasets)/{name}/tree/(\w+)", self._hf_listing),
            (rf"/(?:(datasets)/)?{name}/resolve/(\w+)/(.+)", self._hf_file),
            ("/api/v1/(models|datasets)", self._ms_create),
            (rf"/api/v1/repos/(models|datasets)/{name}/info/lfs/objects/batch", self._ms_blobs),
            (r"/blobs/(\w+)", self._ms_blob),
            (rf"/api/v1/repos/(models|datasets)/{name}/commit/(\w+)", self._ms_commit),
            ("/api/repos/create", self._hf_create),
            ("/api/validate-yaml", lambda match, query, body: self._json(200, {"errors": [], "warnings": []})),
            (rf"/api/(models|datasets)/{name}/preupload/(\w+)", self._hf_preupload),
            (rf"/api/(models|datasets)/{name}/commit/(\w+)", self._hf_commit),
        ]

    def _files(self, kind: str, repo_id: str) -> dict[str, bytes] | None:
        """Return the files, or answer that there are none to be seen."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo_id in self.server.gated:
            self._json(403, {"error": "gated", "Message": "access denied"}, {"X-Error-Code": "GatedRepo"})
        elif repo_id in self.server.private and token != "secret":
            self._json(401, {"error": "Invalid username or password.", "Message": "unauthorized"})
        elif (PLURAL[kind], repo_id) not in self.server.repos:
            self._json(404, {"error": "Repository not found", "Message": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
        else:
            return self.server.repos[PLURAL[kind], repo_id]
        return None

    def _ms_listing(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self._files(match[1], match[2])
        if files is not None:
            entries = [{"Path": name, "Name": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                       for name, data in files.items()]
            self._json(200, {"Code": 200, "Success": True, "Data": {"Files": entries}})

    def _ms_file(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self._files(match[1], match[2])
        if files is not None:
            self._content(query["FilePath"], files[query["FilePath"]])

    def _ms_create(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted['Path']}/{wanted['Name']}"
        if repo_id in self.server.gated:
            self._json(403, {"Message": "You may not write here."})
        elif (PLURAL[match[1]], repo_id) in self.server.repos:
            self._json(400, {"Message": "the repository already exists"})
        else:
            self.server.repos[PLURAL[match[1]], repo_id] = {}
            self._json(200, {"Code": 200, "Success": True, "Data": {"Name": wanted["Name"], "Path": wanted["Path"]}})

    def _ms_blobs(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        objects = [{"oid": entry["oid"], "actions": {"upload": {"href": f"{self.server.url}/blobs/{entry['oid']}"}}}
                   for entry in json.loads(body)["objects"]]
        self._json(200, {"Code": 200, "Success": True, "Data": {"objects": objects}})

    def _ms_blob(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        self.server.blobs[match[1]] = body
        self._json(200, {"Code": 200})

    def _ms_commit(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self.server.uploaded.setdefault((PLURAL[match[1]], match[2]), {})
        for action in json.loads(body)["actions"]:
            is_blob = action["type"] == "lfs"
            files[action["path"]] = self.server.blobs[action["sha256"]] if is_blob else base64.b64decode(action["content"])
        self._json(200, {"Code": 200, "Success": True, "Data": {"oid": COMMIT, "commitId": COMMIT}})

    def _hf_info(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self._files(match[1], match[2])
        if files is not None and match[3] not in ("main", COMMIT):
            self._json(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        elif files is not None:
            self._json(200, {"id": match[2], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def _hf_listing(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self._files(match[1], match[2])
        if files is not None:
            self._json(200, [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                             for name, data in files.items()])

    def _hf_file(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        files = self._files(match[1] or "models", match[2])
        if files is not None:
            self._content(match[4], files[match[4]])

    def _hf_create(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
        if repo_id in self.server.gated:
            self._json(403, {"error": "You may not write here."})
            return
        self.server.repos.setdefault((wanted.get("type") or "model", repo_id), {})
        self._json(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def _hf_preupload(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        self._json(200, {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                                   for file in json.loads(body)["files"]]})

    def _hf_commit(self, match: re.Match, query: dict[str, str], body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.uploaded[PLURAL[match[1]], match[2]] = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
        self._json(200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.url}/{match[2]}/commit/{COMMIT}"})

    def _content(self, name: str, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        part = data[start:]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and self.server.cut.get(name, 0) > 0:
            self.server.cut[name] -= 1
            self._head(206 if wanted else 200, len(part), headers)
            self.wfile.write(part[:len(part) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self._send(206 if wanted else 200, part, headers)

    def _json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(data), headers)
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: int, size_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(size_bytes), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def server() -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def ms_service(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """The server as ModelScope, with an empty cache, no login and no retries."""
    import modelscope_hub._download
    import modelscope_hub.config

    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "ms-home"))
    monkeypatch.setattr(modelscope_hub.config, "_default_config", None)
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_RETRY_TIMES", 0)
    return server


@pytest.fixture
def hf_service(server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """The server as Hugging Face, with an empty cache, no login and no waiting between retries."""
    import huggingface_hub.constants
    import huggingface_hub.file_download

    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server
