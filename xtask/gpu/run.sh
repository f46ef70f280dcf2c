#!/bin/sh
# Runs the check of `cargo xtask gpu` on a machine with a CUDA device; the argument is the size of the model whose
# decoding is timed: tiny, small or 1b.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -e /proc/driver/nvidia/version ] && ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
  echo "NVIDIA's driver is not there: no /proc/driver/nvidia/version and no libcuda.so.1" >&2
  exit 2
fi
missing=$(ldd "$here/check_accelerator" | grep 'not found' || true)
if [ -n "$missing" ]; then
  echo "libraries of this machine that the program needs:" >&2
  echo "$missing" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null || true
# A toolkit of the machine goes first; the library in the archive serves where there is none.
if [ -z "${CUDA_PATH:-}" ] && [ ! -f /usr/local/cuda/nvvm/libdevice/libdevice.10.bc ]; then
  CUDA_PATH="$here/cuda"
  export CUDA_PATH
fi
exec "$here/check_accelerator" cuda "$@"
