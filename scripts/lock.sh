#!/usr/bin/env bash
# Resolve pyproject.toml with the extras that `make demo` and `make test` need, and write requirements.lock, with the
# hashes of all files of all that is in it.
#
#   PYTHON=python3.11 TORCH_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" scripts/lock.sh
#
# Torch is pinned by hand, in requirements-torch.lock: training results are compared across machines. Its CUDA packages
# (nvidia-*) stay out of the lock, because torch pins them itself and they differ from machine to machine. Triton is
# in it: torch brings it for CUDA alone, and tests interpret its kernels. setuptools is what builds the packages here.
set -euo pipefail

TRITON=3.7.1 # the one that torch pins for CUDA
root=$(cd "$(dirname "$0")/.." && pwd)
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"${PYTHON:-python3}" -m venv "$fresh/venv"
# shellcheck disable=SC2086  # PIP_ARGS holds several words
"$fresh/venv/bin/pip" install --quiet ${PIP_ARGS:-} ${TORCH_ARGS:-} -r "$root/requirements-torch.lock" "triton==$TRITON" \
  setuptools uv "${root}[ocr,dev]" "$root"/packages/*
"$fresh/venv/bin/pip" freeze --all --exclude pip --exclude wheel --exclude torch \
  --exclude spotlight-rl --exclude spotlight-kernels --exclude spotlight-rewards --exclude spotlight-files --exclude spotlight-weights --exclude spotlight-fleet --exclude spotlight-plan --exclude spotlight-dashboard --exclude spotlight-bucket |
  grep -vE '^(nvidia-|cuda-)' | sort -f >"$fresh/all.txt"
"$fresh/venv/bin/uv" pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate "$fresh/all.txt" \
  --output-file "$fresh/hashed.txt" >/dev/null
{
  sed '/^[^#]/,$d' "$root/requirements.lock" # what it says of itself
  cat "$fresh/hashed.txt"
} >"$fresh/requirements.lock"
mv "$fresh/requirements.lock" "$root/requirements.lock"
