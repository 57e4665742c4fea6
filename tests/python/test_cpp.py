"""The C++ test programs, one test each, so that one summary covers everything. Build them with `make build`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("UNISONO_BUILD_DIR", REPOSITORY / "build" / "release"))
PROGRAMS = {
    "core": (BUILD / "tests" / "core_tests", 600),
    "core under ThreadSanitizer": (REPOSITORY / "build" / "thread" / "tests" / "core_tests", 900),
    "core under AddressSanitizer": (REPOSITORY / "build" / "address" / "tests" / "core_tests", 900),
    **{name: (BUILD / "tests" / f"{name}_tests", 600) for name in ("torch_comm", "reducer", "nn")
       if any((REPOSITORY / "tests" / name).glob("*.cc"))},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program, limit_s = PROGRAMS[name]
    if not program.exists():
        if os.environ.get("UNISONO_REQUIRE_CPP"):
            pytest.fail(f"{program} was not built")
        pytest.skip(f"{program} was not built")
    try:
        result = subprocess.run([program, "--gtest_brief=1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", timeout=limit_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"{program} did not end within {limit_s} s; its last output:\n"
                    f"{(expired.stdout or b'')[-4000:]!r}")
    passed = re.search(r"\[  PASSED  \] (\d+) tests?\.", result.stdout)
    print(f"{name}: {passed[0] if passed else 'no summary'}")
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-8000:]}"
    assert passed, f"no test ran:\n{result.stdout[-2000:]}"
    assert int(passed[1]) > 0


def test_differential():
    """The kept seeds and 500 random programs, ours against a single process; docs/differential.md has the long run."""
    program = BUILD / "tests" / "differential_tests"
    if not program.exists():
        if os.environ.get("UNISONO_REQUIRE_CPP"):
            pytest.fail(f"{program} was not built")
        pytest.skip(f"{program} was not built")
    result = subprocess.run([program, "--cases", "500"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            errors="replace", timeout=300, stdin=subprocess.DEVNULL)
    summary = re.search(r"(\d+) cases, (\d+) differences", result.stdout)
    print(summary[0] if summary else "no summary")
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-8000:]}"
    assert int(summary[1]) >= 500
    assert "pairs of options seen, 0 not" in result.stdout, result.stdout[-4000:]


def test_mutants_still_fit():
    """Every patch of tools/mutants.py applies to the source as it is. Running them takes half an hour and a build."""
    result = subprocess.run([sys.executable, REPOSITORY / "tools" / "mutants.py", "--check"], capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
