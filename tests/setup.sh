#!/usr/bin/env bash
# Installs what is missing, and says nothing where nothing is.
#   tests/setup.sh packages   Debian packages to build and run with (needs root or sudo, else names what to install)
#   tests/setup.sh slurm      the packages of the one-node Slurm that a test starts; going on without is fine
#   tests/setup.sh venv       build/venv with the Python packages of the tests
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(build-essential cmake pkg-config libhdf5-dev libzstd-dev libcjson-dev libxxhash-dev libdnnl-dev
  libopenmpi-dev openmpi-bin libcmocka-dev python3-venv)

# A one-node Slurm, for the test of the sbatch script alone. Where it cannot be had that test skips and says so.
slurm_packages=(slurm-wlm munge)

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

case "${1:-}" in
packages) install_packages "${packages[@]}" ;;
slurm) install_packages "${slurm_packages[@]}" || say "going on without Slurm: its test will skip" ;;
venv) make_venv ;;
*)
  echo "usage: tests/setup.sh packages|slurm|venv" >&2
  exit 2
  ;;
esac
