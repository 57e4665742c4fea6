#!/bin/bash
# Builds against a CUDA torch and tries what needs GPUs: NCCL behind the adapter, buckets on devices, our wrapper against torch's.
#   tools/try_gpus.sh          on a machine with NVIDIA GPUs; makes .venv-cuda and build/cuda
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvidia-smi >/dev/null || { echo "try_gpus: no nvidia-smi, so there is no GPU to try" >&2; exit 1; }
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "try_gpus: nvidia-smi lists no GPU" >&2; exit 1; }

venv=.venv-cuda
[ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv
$venv/bin/python -m pip install --quiet --disable-pip-version-check -r tools/requirements.txt
$venv/bin/python -c 'import torch; assert torch.cuda.is_available() and torch.distributed.is_nccl_available(), torch.__version__'
# Headers that torch's own packages leave out, of the version that is there.
toolkit=$($venv/bin/python -c 'from importlib.metadata import version; print(version("cuda-toolkit"))' 2>/dev/null) &&
  $venv/bin/python -m pip install --quiet --disable-pip-version-check "cuda-toolkit[crt,cccl]==$toolkit"
export PATH="$PWD/$venv/bin:$PATH"
cmake -S . -B build/cuda -G Ninja --log-level=ERROR -DUNISONO_PYTHON=ON -DUNISONO_TESTS=OFF -DUNISONO_NCCL=ON -DPython3_EXECUTABLE="$PWD/$venv/bin/python" \
  -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
cmake --build build/cuda --target unisono _C

ranks=$((gpus < 4 ? gpus : 4))
PYTHONPATH=build/cuda/python torchrun --standalone --nproc-per-node "$ranks" tests/gpu/wrapper_on_devices.py --device cuda
PYTHONPATH=build/cuda/python torchrun --standalone --nproc-per-node "$ranks" tests/gpu/own_group.py nccl
