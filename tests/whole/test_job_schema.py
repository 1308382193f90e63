"""schemas/job.schema.json accepts exactly what the program accepts: the table that tests/unit/test_job.c reads too.

Files named beyond_* break a rule that a schema cannot say; those the schema accepts."""
import json

import jsonschema
import pytest

from harness import ROOT

JOBS = ROOT / "tests/data/jobs"
SCHEMA = json.loads((ROOT / "schemas/job.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def is_accepted(path):
    try:
        job = json.loads(path.read_text(), parse_constant=refuse_constant)
    except ValueError:
        return False
    return VALIDATOR.is_valid(job)


def names(folder):
    return sorted(path.name for path in (JOBS / folder).glob("*.json"))


def test_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", names("good"))
def test_good(name):
    assert is_accepted(JOBS / "good" / name)


@pytest.mark.parametrize("name", names("bad"))
def test_bad(name):
    assert is_accepted(JOBS / "bad" / name) == name.startswith("beyond_")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_configs(path):
    assert is_accepted(path)
