"""A built spec that the tests of the commands look at."""

from pathlib import Path

import pytest

from kdgen import cli

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "specs" / "engines" / "tiny.yaml")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of `kdgen build` of the tiny engine, for the host and sm_120."""
    out = tmp_path_factory.mktemp("cli") / "generated"
    assert cli.run(["build", TINY, "--arch", "host", "--arch", "sm_120", "--out", str(out)]) == 0
    return out
