"""The hand-out of units among many ranks, with units of no work (tests/bench/bench_ranks.c): every unit is done once,
whoever asks how early, and a stop or a failure of any rank ends all of them."""
import json

import pytest

import harness

PROGRAM = harness.ACTDUMP.parents[1] / "tests/bench/bench_ranks"
RANKS = 16


def hand_out(*arguments, ranks=RANKS):
    """(outcome, what rank 0 printed)"""
    assert PROGRAM.exists(), f"{PROGRAM} is not there: build it"
    line = ["mpirun", "--oversubscribe", "-n", str(ranks), str(PROGRAM), *map(str, arguments)]
    # Open MPI leaks on its own account (harness.without_leaks)
    outcome = harness.run_command(line, harness.without_leaks(("run",)), timeout=120)
    lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
    assert len(lines) == 1, outcome.text
    return outcome, json.loads(lines[0])


@pytest.mark.parametrize("ahead", [[], ["--ahead"]])
def test_every_unit_is_done_once(ahead):
    """Rank 0 would take all units of no work before another's first request: it takes none, then they last a moment."""
    for arguments in (["--units", 3000, "--only-others"], ["--units", 200, "--work", 0.01, "--batches", 2]):
        outcome, got = hand_out(*arguments, *ahead)
        outcome.expect(harness.OK)
        assert (got["ranks"], got["units"], got["wrong"]) == (RANKS, arguments[1], 0)


@pytest.mark.parametrize("units", [1, RANKS - 1, RANKS + 1])
def test_fewer_or_hardly_more_units_than_ranks(units):
    outcome, got = hand_out("--units", units, "--ahead", "--only-others")
    outcome.expect(harness.OK)
    assert (got["units"], got["wrong"]) == (units, 0)


@pytest.mark.parametrize("how, expected", [("--stop-at", harness.STOPPED), ("--fail-at", harness.INPUT)])
@pytest.mark.parametrize("ahead", [[], ["--ahead"]])
def test_one_rank_stops_all(how, expected, ahead):
    """Units that were asked for ahead are then left undone; none is done twice and nobody hangs."""
    outcome, got = hand_out("--units", 100000, "--only-others", how, 700, *ahead)
    outcome.expect(expected)
    assert got["status"] == expected and got["wrong"] == 0
    assert got["units"] < 100000


def test_one_rank_alone():
    outcome, got = hand_out("--units", 1000, "--ahead", ranks=1)
    outcome.expect(harness.OK)
    assert (got["units"], got["wrong"]) == (1000, 0)
