#!/usr/bin/env bash
# Usage: environment.sh VENV PYTHON TORCH
# Makes the virtual environment VENV where there is none, sees that it has a torch, and notes which one in
# VENV/tensor-parallel/torch.txt, a pip constraint.
set -euo pipefail
venv=$1 python=$2 torch=$3

if [ ! -x "$venv/bin/python" ]; then
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or newer is needed, $python is older or missing: name one by PYTHON=path/to/python3.11" >&2
    exit 1
  fi
  options=()
  if "$python" -c 'import torch' 2>/dev/null; then
    prefix=$("$python" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')
    if [ -n "$prefix" ]; then
      echo "$python belongs to a virtual environment, whose torch another one cannot see: use VENV=$prefix" >&2
      exit 1
    fi
    options=(--system-site-packages)
    echo "taking the torch of $python"
  fi
  echo "making the virtual environment $venv"
  "$python" -m venv ${options[@]+"${options[@]}"} "$venv"
fi

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "installing $torch (large; bring your own with VENV= or PYTHON=, see README.md)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
fi
mkdir -p "$venv/tensor-parallel"
"$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$venv/tensor-parallel/torch.txt"
