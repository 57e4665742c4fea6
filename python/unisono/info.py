"""`unisono info`: what is installed, what this machine offers, what the environment says."""

import os
import platform
import sys

import torch

import unisono
from unisono.launch import available_cores


def describe() -> str:
    cores, exclusive = available_cores()
    lines = [
        f"unisono      {unisono.__version__}",
        f"torch        {torch.__version__}",
        f"python       {platform.python_version()} ({sys.executable})",
        f"cores        {len(cores)}" + ("" if exclusive else " (by the container's quota)"),
        f"threads      {torch.get_num_threads()} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})",
        f"CMake prefix {unisono.cmake_prefix_path()}",
        f"environment  {unisono.describe_environment()}",
        "transports for 2 ranks on this machine:",
    ]
    for name, viable, reason in unisono.viable_transports(2):
        lines.append(f"  {name:10} {'yes' if viable else 'no: ' + reason}")
    return "\n".join(lines)
