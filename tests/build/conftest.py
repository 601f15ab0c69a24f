"""Every build test has a cache of its own, and inline kernels."""

from pathlib import Path

import pytest

from tests.build import fakes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(place))
    return place


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch.setattr)
