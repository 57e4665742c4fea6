"""The package as others see it: importable, versioned, usable from CMake, both from pip and from `cmake --install`."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import unisono
from unisono.version import TORCH_MINOR, check_torch

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("UNISONO_BUILD_DIR", REPOSITORY / "build" / "release"))
BUILD_LIMIT_S = 300


def quiet(*command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=BUILD_LIMIT_S,
                            stdin=subprocess.DEVNULL, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def installed_by_pip():
    return (Path(unisono.cmake_prefix_path()) / "lib" / "cmake" / "unisono").is_dir()


def test_versions_come_from_one_place():
    cmake = (REPOSITORY / "CMakeLists.txt").read_text()
    assert unisono.__version__ == re.search(r"project\(unisono VERSION ([\d.]+)", cmake)[1]
    assert re.search(r'UNISONO_TORCH_VERSION "([\d.]+)"', cmake)[1] == TORCH_MINOR
    assert f'"torch=={TORCH_MINOR}.*"' in (REPOSITORY / "pyproject.toml").read_text()
    if installed_by_pip():
        assert metadata.version("unisono") == unisono.__version__


def test_another_torch_is_refused_with_the_line_that_mends_it():
    check_torch(torch.__version__)
    for other in ("2.12.1+cu128", "2.1.3", "3.13.0"):
        with pytest.raises(ImportError, match=rf"torch {re.escape(other)} is installed.*\n  pip install torch=="):
            check_torch(other)


def test_errors_are_python_s():
    from unisono import errors

    assert issubclass(unisono.InvalidArgumentError, ValueError)
    assert issubclass(unisono.TimeoutError, TimeoutError)
    assert issubclass(unisono.PeerLostError, ConnectionError)
    for code in ("invalid_argument", "mismatch", "timeout", "peer_lost", "corrupt", "internal"):
        error = errors.make(code, "text")
        assert isinstance(error, unisono.Error)
        assert isinstance(error, RuntimeError)
        assert (error.code, str(error)) == (code, "text")
    with pytest.raises(unisono.InvalidArgumentError, match="no-such-transport") as raised:
        unisono.init(transport="no-such-transport")
    assert raised.value.code == "invalid_argument"


def test_stubs_name_everything_the_module_has():
    stub = (Path(unisono.__file__).parent / "_C.pyi").read_text()
    missing = [name for name in dir(unisono._C) if not name.startswith("__") and not re.search(rf"\b{name}\b", stub)]
    for kind in (unisono._C.ProcessGroup, unisono._C.DataParallel, unisono._C.StepStats, unisono._C.Work,
                 unisono._C.TraceEvent, unisono._C.DistributedDataParallelOptions):
        missing += [name for name in vars(kind) if not name.startswith("_") and f"{name}" not in stub]
    assert missing == []
    assert (Path(unisono.__file__).parent / "py.typed").is_file()


def test_info(unisono_command):
    result = unisono_command("info")
    assert result.returncode == 0, result.stderr
    for words in (f"unisono      {unisono.__version__}", f"torch        {torch.__version__}", "transports", "shm"):
        assert words in result.stdout


def consume(prefix, directory, unisono_command, *more):
    """Builds tests/consumer against `prefix` and runs it on 2 ranks."""
    quiet("cmake", "-S", REPOSITORY / "tests" / "consumer", "-B", directory, "-G", "Ninja",
          f"-DCMAKE_PREFIX_PATH={prefix}", *more)
    quiet("cmake", "--build", directory)
    result = unisono_command("run", "-n", 2, "--timeout", 60, directory / "train")
    assert result.returncode == 0, result.stdout + result.stderr
    digests = set(re.findall(r"replicas identical: yes, digest (\w{64})", result.stdout))
    assert len(digests) == 1, result.stdout
    assert result.stdout.count("identical: yes") == 2


def test_outside_project_against_the_wheel(unisono_command, tmp_path):
    """I2."""
    if not installed_by_pip():
        pytest.skip(f"unisono is imported from {unisono.cmake_prefix_path()}, which pip did not install")
    consume(unisono.cmake_prefix_path(), tmp_path, unisono_command)


def test_outside_project_against_cmake_install(unisono_command, tmp_path):
    """I2."""
    if not (BUILD / "CMakeCache.txt").is_file():
        pytest.skip(f"no build directory {BUILD}; set UNISONO_BUILD_DIR")
    prefix = tmp_path / "prefix"
    quiet("cmake", "--install", BUILD, "--prefix", prefix, "--component", "cpp")
    assert sorted(path.name for path in prefix.iterdir()) == ["include", "lib"]
    consume(f"{prefix};{torch.utils.cmake_prefix_path}", tmp_path / "build", unisono_command)


def test_a_wrong_torch_is_named_by_cmake(tmp_path):
    if not (BUILD / "CMakeCache.txt").is_file():
        pytest.skip(f"no build directory {BUILD}; set UNISONO_BUILD_DIR")
    quiet("cmake", "--install", BUILD, "--prefix", tmp_path / "prefix", "--component", "cpp")
    fake = tmp_path / "torch" / "share" / "cmake" / "Torch"
    fake.mkdir(parents=True)
    (fake / "TorchConfig.cmake").write_text("add_library(torch INTERFACE IMPORTED)\nset(TORCH_FOUND TRUE)\n")
    (fake / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.12.1")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n')
    result = subprocess.run(["cmake", "-S", REPOSITORY / "tests" / "consumer", "-B", tmp_path / "build", "-G", "Ninja",
                             f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'};{tmp_path / 'torch'}"],
                            capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    assert result.returncode != 0
    assert re.search(r"torch 2\.12\.1 was\s+found", result.stderr), result.stderr
    assert f"pip install torch=={TORCH_MINOR}.0" in result.stderr


def test_python_m_unisono_is_the_command():
    result = subprocess.run([sys.executable, "-m", "unisono", "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for name in ("run", "info", "bench", "trace"):
        assert name in result.stdout
