#!/usr/bin/env bash
# Resolve pyproject.toml with the extras that `make demo` and `make test` need, and write requirements.lock.
#
#   PYTHON=python3.11 PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" scripts/lock.sh
#
# Torch is pinned here, by hand: training results are compared across machines. Its CUDA packages (nvidia-*) and
# local version tags (+cpu, +cu130) stay out of the lock, because torch pins them itself and they differ from
# machine to machine. Triton is in it: torch brings it for CUDA alone, and tests interpret its kernels.
set -euo pipefail

TORCH=2.13.0
TRITON=3.7.1 # the one that torch pins for CUDA
root=$(cd "$(dirname "$0")/.." && pwd)
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"${PYTHON:-python3}" -m venv "$fresh/venv"
# shellcheck disable=SC2086  # PIP_ARGS holds several words
"$fresh/venv/bin/pip" install --quiet ${PIP_ARGS:-} "torch==$TORCH" "triton==$TRITON" "$root[ocr,dev]" "$root"/packages/*
{
  echo "# Made by scripts/lock.sh (make lock) from pyproject.toml with the extras ocr and dev."
  echo "# pip install -r requirements.lock && pip install --no-deps -e . -e packages/kernels -e packages/rewards -e packages/plan -e packages/dashboard"
  "$fresh/venv/bin/pip" freeze --exclude spotlight-rl --exclude spotlight-kernels --exclude spotlight-rewards --exclude spotlight-plan --exclude spotlight-dashboard |
    sed -E 's/^(torch==[^+]*)\+.*/\1/' | grep -vE '^(nvidia-|cuda-)' | sort -f
} > "$fresh/requirements.lock"
mv "$fresh/requirements.lock" "$root/requirements.lock"
