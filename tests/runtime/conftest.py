from __future__ import annotations

from pathlib import Path

import pytest

from kdgen.runtime.host import HostDevice
from kdgen.runtime.kit import Kit, load
from tests.runtime.builds import CONTRACTS, compile_library, write_build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_library(tmp_path_factory.mktemp("library") / "kernels.so")


@pytest.fixture
def built(tmp_path: Path, library: bytes) -> Path:
    """OUT/SPEC with a build for the host."""
    write_build(tmp_path / "small" / "host", dict.fromkeys(CONTRACTS, library))
    return tmp_path / "small"


@pytest.fixture
def kit(built: Path) -> Kit:
    return load(built, HostDevice())
