#!/usr/bin/env bash
# Installs what is missing, and says nothing where nothing is.
#   tests/setup.sh packages   Debian packages to build and run with (needs root or sudo, else names what to install)
#   tests/setup.sh slurm      the packages of the one-node Slurm that a test starts; going on without is fine
#   tests/setup.sh browser    Chromium, in which a test looks at the report; going on without is fine
#   tests/setup.sh venv       build/venv with the Python packages of the tests
#   tests/setup.sh training   build/venv-training with PyTorch and what else trains on stores (6.3 GB); a test asks for it
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(build-essential cmake pkg-config libhdf5-dev libzstd-dev libcjson-dev libxxhash-dev libdnnl-dev
  libopenmpi-dev openmpi-bin libcmocka-dev python3-venv)

# A one-node Slurm, for the test of the sbatch script alone. Where it cannot be had that test skips and says so.
slurm_packages=(slurm-wlm munge)
browser_packages=(chromium fonts-dejavu-core)

# What build/venv-training is installed with: it unpacks wheels side by side, five times as fast as pip.
uv=uv==0.13.9
training_mb=8000 # free disk that installing needs
training_seconds=600

say() { printf 'setup: %s\n' "$*"; }

is_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

install_packages() { # packages ...
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: needed are a C compiler, CMake 3.21, pkg-config, HDF5, zstd, cJSON, xxHash, oneDNN, MPI, CMocka, Python's venv"
    return 0
  fi
  local missing=() package
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      say "missing: ${missing[*]}" >&2
      say "install them first: apt-get install ${missing[*]}" >&2
      return 1
    fi
    root=(sudo)
  fi
  say "installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    say "apt-get failed: its whole output is in $log" >&2
    return 1
  fi
  rm -f "$log"
}

make_venv() {
  local venv=build/venv stamp=build/venv/requirements.installed
  cmp -s tests/requirements.txt "$stamp" && "$venv/bin/python" -c '' 2>/dev/null && return 0
  say "Python packages of the tests into $venv"
  mkdir -p build
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/requirements.txt </dev/null
  cp tests/requirements.txt "$stamp"
}

make_training_venv() {
  local venv=build/venv-training stamp=build/venv-training/requirements.installed
  local lists=(tests/requirements.txt python/tests/requirements-training.txt)
  cat "${lists[@]}" | cmp -s - "$stamp" && "$venv/bin/python" -c '' 2>/dev/null && return 0
  mkdir -p build
  local free_mb
  free_mb=$(df --output=avail --block-size=1M build | tail -n 1)
  if [ "$free_mb" -lt "$training_mb" ]; then
    say "PyTorch and its libraries want $training_mb MB of disk, $free_mb are free" >&2
    return 1
  fi
  say "PyTorch and what trains on stores into $venv"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$uv" </dev/null
  # The cache is in build/, so that files are linked out of it and not copied, and goes when they are.
  UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/build/uv-cache} timeout "$training_seconds" "$venv/bin/uv" pip install --quiet \
    --python "$venv/bin/python" -r "${lists[1]}" </dev/null
  rm -rf build/uv-cache
  # Do they work; and their bytecode, which uv leaves to the first import and the tests' -B would make each time anew.
  "$venv/bin/python" -c 'import torch, dictionary_learning, datasets, tokenizers, pyarrow.parquet' >/dev/null
  cat "${lists[@]}" >"$stamp"
}

case "${1:-}" in
packages) install_packages "${packages[@]}" ;;
slurm) install_packages "${slurm_packages[@]}" || say "going on without Slurm: its test will skip" ;;
browser) install_packages "${browser_packages[@]}" || say "going on without a browser: its test will skip" ;;
venv) make_venv ;;
training) make_training_venv ;;
*)
  echo "usage: tests/setup.sh packages|slurm|browser|venv|training" >&2
  exit 2
  ;;
esac
