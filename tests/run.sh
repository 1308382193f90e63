#!/usr/bin/env bash
# Builds and tests in three stages: release (everything), asan (AddressSanitizer and UndefinedBehaviorSanitizer: unit
# tests and the main whole-program tests), tsan (the threaded parts). All stages run even where one fails; the last line
# sums them up and the exit status is 0 only where every test of every stage passed. While a stage's tests run, the next
# one is built out of what they leave of the processors.
#   tests/run.sh [release|asan|tsan ...]
# CMAKE_ARGS in the environment goes to CMake: CMAKE_ARGS=-DACTDUMP_CUDA=OFF tests/run.sh release
set -u
cd "$(dirname "$0")/.." || exit 1
jobs=${JOBS:-$(nproc)}
tests_at_once=$((jobs + (jobs + 1) / 2)) # a third of them waits: for a signal, a start, a disk
results=build/results
mkdir -p "$results"
rm -f "$results"/*.xml
status=0
threaded=(test_writer test_landing test_schedule test_statistics)

build() { # preset, folder, targets (none: all)
  local log=$results/build-$1.log targets=()
  [ $# -gt 2 ] && targets=(--target "${@:3}")
  # shellcheck disable=SC2086 # CMAKE_ARGS holds words
  if ! {
    cmake --preset "$1" -DACTDUMP_PYTHON="$PWD/build/venv/bin/python" ${CMAKE_ARGS:-} &&
      cmake --build "$2" -j "$jobs" "${targets[@]}" -- -k
  } >"$log" 2>&1; then
    grep -E -A 8 'error:|Error at|undefined reference' "$log" | head -n 60
    printf '== %s: the build failed, its log is %s\n' "$1" "$log"
    printf '<testsuite><testcase name="the build with preset %s" status="fail"/></testsuite>\n' "$1" >"$results/$1.xml"
    return 1
  fi
}

check() { # stage, folder, ctest's selection ...
  local stage=$1 folder=$2
  shift 2
  printf '== %s: testing\n' "$stage"
  ctest --test-dir "$folder" -j "$tests_at_once" --output-on-failure --no-tests=error --output-junit "$PWD/$results/$stage.xml" "$@" ||
    status=1
}

build_stage() {
  case "$1" in
  release) build test build ;;
  asan) build asan build/asan ;;
  tsan) build tsan build/tsan "${threaded[@]}" ;;
  esac
}

check_stage() {
  case "$1" in
  release) check release build ;;
  asan) check asan build/asan -L 'unit|fuzz|sanitized' ;;
  tsan) check tsan build/tsan -R "^($(IFS='|' && printf '%s' "${threaded[*]}"))\$" ;;
  esac
}

# shellcheck disable=SC2206 # one argument may hold several words
stages=(${@:-release asan tsan})
for stage in "${stages[@]}"; do
  case "$stage" in
  release | asan | tsan) ;;
  *)
    printf 'usage: tests/run.sh [release|asan|tsan ...]\n' >&2
    exit 2
    ;;
  esac
done

printf '== %s: building\n' "${stages[0]}"
build_stage "${stages[0]}"
is_built=$?
for i in "${!stages[@]}"; do
  next=${stages[i + 1]:-}
  if [ -n "$next" ]; then
    (
      renice -n 10 "$BASHPID" >/dev/null
      build_stage "$next"
    ) &
  fi
  if [ $is_built -eq 0 ]; then check_stage "${stages[i]}"; else status=1; fi
  if [ -n "$next" ]; then
    printf '== %s: building\n' "$next"
    wait $!
    is_built=$?
  fi
done
build/venv/bin/python tests/summary.py "$results"/*.xml || status=1
exit $status
