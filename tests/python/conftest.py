"""Helpers of the Python tests: the launcher as a user calls it, and functions run on N ranks under a deadline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import RankPool

REPOSITORY = Path(__file__).resolve().parents[2]
HARD_LIMIT_S = 120


@pytest.fixture
def unisono_command():
    """Runs `unisono ARGS`, ends it after HARD_LIMIT_S, returns the finished process with its text."""

    def call(*args, timeout=HARD_LIMIT_S, env=None, cwd=None):
        return subprocess.run([sys.executable, "-m", "unisono", *map(str, args)], capture_output=True, text=True,
                              timeout=timeout, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}, cwd=cwd)

    return call


@pytest.fixture(scope="session")
def _pools():
    pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools, tmp_path):
    """`on_ranks(n, function, *args)` calls function(group, *args) on n ranks and returns the n results in rank order."""

    def call(n, function, *args, timeout=HARD_LIMIT_S, group=True, env=None):
        pool = _pools.get(n)
        if pool is None or not pool.usable:
            pool = _pools[n] = RankPool(n)
        return pool.run(function, args, timeout, group, env or {})

    return call
