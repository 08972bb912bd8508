"""Fetching by name: only a whole, verified file is ever present, and each failure says what to do.

pip is replaced by a stand-in that writes a small wheel, so nothing here needs a network.
"""

import hashlib
import io
import threading
import zipfile
from pathlib import Path

import platformdirs
import pytest

from jaxinfer.checkpoints import fetch as fetching
from jaxinfer.checkpoints.fetch import FetchError, catalog, fetch, resolve

CONTENT = bytes(range(256)) * 9000  # 2.3 MB: more than one block


def make_wheel(content: bytes, member: str = "pkg/model.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("pkg/__init__.py", "raise SystemExit('a wheel must never be run')")
    return buffer.getvalue()


class Pip:
    """Stands in for subprocess.Popen: writes `wheel` where pip was told to, or fails with `error`."""

    def __init__(self):
        self.wheel: bytes = make_wheel(CONTENT)
        self.error: str | None = None
        self.raises: BaseException | None = None
        self.commands: list[list[str]] = []
        self.returncode = 0

    def __call__(self, command, *, stdout, stderr, env):
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(folder)
        if self.error is not None:
            stderr.write(self.error.encode())
            self.returncode = 1
        else:
            (folder / "pkg-1-py3-none-any.whl").write_bytes(self.wheel)
        return self

    def poll(self):
        if self.raises is not None:
            raise self.raises
        return self.returncode

    def kill(self):
        pass

    def wait(self):
        pass


@pytest.fixture
def pip(monkeypatch, tmp_path) -> Pip:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "tiny.toml").write_text(
        f'name = "tiny"\nlicence = "MIT"\nwheel = "pkg==1"\nmember = "pkg/model.gguf"\n'
        f'bytes = {len(CONTENT)}\nsha256 = "{hashlib.sha256(CONTENT).hexdigest()}"\n'
    )
    monkeypatch.setattr(fetching, "CATALOG", tmp_path / "catalog")
    pip = Pip()
    monkeypatch.setattr(fetching.subprocess, "Popen", pip)
    return pip


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def everything(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_fetches_once_without_dependencies_or_source_builds(pip, cache):
    path = fetch("tiny", cache)
    assert path.read_bytes() == CONTENT
    assert fetch("tiny", cache) == path
    assert len(pip.commands) == 1
    assert {"--no-deps", "--only-binary", "pkg==1"} <= set(pip.commands[0])
    assert everything(cache) == ["model.gguf", "model.gguf.verified"]


def test_a_changed_or_partial_file_is_not_present(pip, cache):
    path = fetch("tiny", cache)
    path.write_bytes(CONTENT[:-1])  # partial
    assert fetch("tiny", cache).read_bytes() == CONTENT
    path.write_bytes(b"x" + CONTENT[1:])  # same size, other content
    assert fetch("tiny", cache).read_bytes() == CONTENT
    assert len(pip.commands) == 3


def test_a_good_file_without_stamp_is_verified_and_not_fetched(pip, cache):
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "model.gguf").write_bytes(CONTENT)
    fetch("tiny", cache)
    assert pip.commands == []
    assert everything(cache) == ["model.gguf", "model.gguf.verified"]


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (make_wheel(b"x" + CONTENT[1:]), "not the published file.*nothing was kept"),
        (make_wheel(CONTENT[:-5]), "not the published file"),
        (make_wheel(CONTENT + bytes(50 << 20)), "not the published file"),
        (make_wheel(CONTENT)[:1000], "damaged"),
        (make_wheel(CONTENT).replace(CONTENT[:300], b"y" * 300, 1), "damaged"),
        (make_wheel(CONTENT, "other.gguf"), r"holds no pkg/model\.gguf"),
    ],
    ids=["hash", "short", "long", "cut", "crc", "member"],
)
def test_a_wrong_download_leaves_nothing(pip, cache, wheel, message):
    pip.wheel = wheel
    with pytest.raises(FetchError, match=message):
        fetch("tiny", cache)
    assert everything(cache) == []


def test_a_wrong_download_does_not_touch_its_neighbour(pip, cache):
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "other.gguf").write_bytes(b"mine")
    pip.wheel = b"nonsense"
    with pytest.raises(FetchError):
        fetch("tiny", cache)
    assert everything(cache) == ["other.gguf"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("/usr/bin/python: No module named pip\n", "has no pip.*ensurepip"),
        ("ERROR: [Errno 28] No space left on device\n", "not enough disk space.*free some space"),
        ("WARNING: Retrying after connection broken by NewConnectionError\n", "check the network"),
        ("ERROR: No matching distribution found for pkg==1\n", "check the network"),
        ("a\nERROR: something odd\n", "ERROR: something odd.*pip download pkg==1"),
        ("", "no message"),
    ],
)
def test_each_failure_of_pip_says_what_to_do(pip, cache, error, message):
    pip.error = error
    with pytest.raises(FetchError, match=message) as raised:
        fetch("tiny", cache)
    assert "\n" not in str(raised.value)
    assert everything(cache) == []


def test_no_disk_space_is_seen_before_the_download(pip, cache, monkeypatch):
    monkeypatch.setattr(
        fetching.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": len(CONTENT)})()
    )
    with pytest.raises(FetchError, match=r"not enough disk space.*5 MB needed, 2 MB free"):
        fetch("tiny", cache)
    assert pip.commands == []


def test_a_cache_that_cannot_be_written_is_a_fetch_error(pip, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="cannot keep tiny"):
        fetch("tiny", cache)


def test_ctrl_c_leaves_nothing_and_the_next_fetch_works(pip, cache):
    pip.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", cache)
    assert everything(cache) == []
    pip.raises = None
    assert fetch("tiny", cache).read_bytes() == CONTENT


def test_concurrent_fetches_all_get_the_file(pip, cache):
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch("tiny", cache).read_bytes())) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 6
    assert everything(cache) == ["model.gguf", "model.gguf.verified"]


def test_resolve_knows_names_folders_and_gguf_files(pip, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: cache)
    assert resolve("tiny") == cache / "models" / "tiny" / "model.gguf"
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    (tmp_path / "m.bin").write_bytes(b"")  # what it is, whoever opens it says
    assert resolve(tmp_path / "m.bin") == tmp_path / "m.bin"
    for unknown in ("tinny", tmp_path / "gone.gguf"):
        with pytest.raises(FetchError, match=r"catalog name \(tiny\), a folder .* or a GGUF file"):
            resolve(unknown)


def test_the_real_catalog_is_complete():
    for name, entry in catalog().items():
        assert name == entry.name and len(entry.sha256) == 64 and entry.bytes > 0 and "==" in entry.wheel


def test_the_real_model_is_not_fetched_again(monkeypatch):
    entry = catalog()["smollm2-135m-instruct"]
    path = platformdirs.user_cache_path("jaxinfer") / "models" / entry.name / entry.file_name
    if not path.is_file():
        pytest.skip("the model was not fetched on this machine")
    monkeypatch.setattr(fetching.subprocess, "Popen", None)
    assert fetch(entry.name) == path
