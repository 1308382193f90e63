"""Ends with 77 where every test of a file skipped, which ctest shows as skipped."""
import pytest

import harness


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and exitstatus == 0 and reporter.stats.get("skipped") and not reporter.stats.get("passed"):
        session.exitstatus = 77


@pytest.fixture(scope="session")
def mamba_store(tmp_path_factory):
    """Every value of the fixture case mamba, in small segments. Not to be changed: copy it first."""
    return harness.run_case(tmp_path_factory.mktemp("mamba"), "mamba", store_options={"unit_tokens": 16})
