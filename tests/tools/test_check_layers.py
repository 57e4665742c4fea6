"""tools/check_layers.py finds each kind of violation, at its line, and nothing else."""

import pathlib
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "check_layers.py"

ENGINE = "<torch/csrc/autograd/engine.h>\n"


def check(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


GOOD = {
    "include/unisono/error.h": "#include <string>\n",
    "include/unisono/ddp.h": "#include <torch/nn/module.h>\n#include <unisono/error.h>\n",
    "src/base/clock.h": "#include <chrono>\n",
    "src/comm/fingerprint.h": '#include "base/clock.h"\n#include <unisono/error.h>\n',
    "src/comm/shm/ring.h": '#include "comm/fingerprint.h"\n#include "comm/shm/ring.h"\n',
    "src/comm/serial/serial.h": "",
    "src/comm/make_group.cc": '#include "comm/shm/ring.h"\n',
    "src/comm/torch_backend/backend.cc": '#include "comm/shm/ring.h"\n#include <c10/core/Event.h>\n',
    "src/comm/issuer/issuer.h": '#include "comm/fingerprint.h"\n',
    "src/comm/mpi/engine.cc": '#include "comm/issuer/issuer.h"\n',
    "src/reducer/bucket.h": "#include <unisono/ddp.h>\n",
    "src/reducer/autograd_hooks.cc": "#include <torch/csrc/autograd/engine.h>\n",
    "src/nn/wrapper.cc": '#include "reducer/bucket.h"\n#include <torch/csrc/autograd/custom_function.h>\n',
}

BAD = {
    "a lower folder": ("src/base/x.h", '\n#include "comm/fingerprint.h"\n', "src/base/x.h:2:"),
    "a transport knows another": ("src/comm/shm/x.cc", '#include "comm/serial/serial.h"\n', "src/comm/shm/x.cc:1:"),
    "a transport without an engine knows the issuer": (
        "src/comm/shm/x.cc", '#include "comm/issuer/issuer.h"\n', "src/comm/shm/x.cc:1:"),
    "the issuer knows an engine": ("src/comm/issuer/x.cc", '#include "comm/mpi/x.h"\n', "src/comm/issuer/x.cc:1:"),
    "torch in the issuer": ("src/comm/issuer/x.h", "#include <c10/core/Event.h>\n", "src/comm/issuer/x.h:1:"),
    "comm knows a transport": ("src/comm/x.h", '#include "comm/shm/ring.h"\n', "src/comm/x.h:1:"),
    "a path that is not relative to src": ("src/comm/shm/x.cc", '#include "ring.h"\n', "src/comm/shm/x.cc:1:"),
    "our own in angle brackets": ("src/comm/shm/x.cc", "#include <base/clock.h>\n", "src/comm/shm/x.cc:1:"),
    "a public header in quotes": ("src/base/x.h", '#include "unisono/error.h"\n', "src/base/x.h:1:"),
    "a public header that is not there": ("src/base/x.h", "#include <unisono/nothing.h>\n", "src/base/x.h:1:"),
    "torch in a torch-free folder": ("src/comm/shm/x.h", "\n\n#include <ATen/ATen.h>\n", "src/comm/shm/x.h:3:"),
    "torch through a public header": ("src/stats/x.cc", "#include <unisono/ddp.h>\n", "src/stats/x.cc:1:"),
    "autograd internals elsewhere": ("src/reducer/x.cc", "#  include " + ENGINE, "src/reducer/x.cc:1:"),
    "autograd internals in public": ("include/unisono/x.h", "#include " + ENGINE, "include/unisono/x.h:1:"),
    "a public header that needs src": ("include/unisono/x.h", '#include "base/clock.h"\n', "include/unisono/x.h:1:"),
    "a folder nobody named": ("src/extra/x.h", "", "src/extra/x.h:1:"),
}


def test_a_good_tree_passes(tmp_path):
    code, out = check(tmp_path, GOOD)
    assert (code, out) == (0, f"layers: {len(GOOD)} files, no violation\n")


@pytest.mark.parametrize("kind", BAD)
def test_a_violation_is_named(tmp_path, kind):
    path, text, where = BAD[kind]
    code, out = check(tmp_path, GOOD | {path: text})
    assert code == 1
    assert [line.startswith(where) for line in out.splitlines()] == [True], out


def test_an_empty_tree_is_not_a_success(tmp_path):
    assert check(tmp_path, {"README": ""})[0] == 1
