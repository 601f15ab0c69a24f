"""Engines of the toy specs, built once per process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kdgen.engine.bundle import config_of
from kdgen.engine.checkpoint import Checkpoint, open_tensors
from kdgen.engine.engine import Engine
from kdgen.engine.random_model import random_tensors
from kdgen.runtime import open_device
from kdgen.spec import Spec, load_spec

SPECS = Path(__file__).parents[2] / "specs" / "engines"
TOYS = sorted(path.stem for path in SPECS.glob("tiny-*.yaml"))


@cache
def spec_of(name: str) -> Spec:
    return load_spec(SPECS / f"{name}.yaml")


@cache
def checkpoint_of(name: str, seed: int) -> Checkpoint:
    config = config_of(spec_of(name))
    return open_tensors(config, dict(random_tensors(config, seed)))


class Engines:
    """Engines by spec, device and seed of the weights; pages are handed out in random order."""

    def __init__(self, out: Path):
        self.out = out
        self._made: dict[tuple[str, str, int], Engine] = {}

    def __call__(self, name: str, device: str, seed: int = 0) -> Engine:
        key = (name, device, seed)
        if key not in self._made:
            rng = np.random.default_rng(seed)
            checkpoint = checkpoint_of(name, seed)
            self._made[key] = Engine.open(spec_of(name), checkpoint, open_device(device), out=self.out, page_rng=rng)
        return self._made[key]


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param
