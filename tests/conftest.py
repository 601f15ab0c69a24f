"""Common to all tests: objects are compiled into a cache of their own, and tests marked `cuda` need a GPU."""

import os
from functools import cache

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Objects are found by content: the workers of a run, and later runs, may share them.
    os.environ["KDGEN_CACHE_DIR"] = str(config.rootpath / ".pytest_cache" / "kdgen-objects")


@cache
def gpu_count() -> int:
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
        return int(driver.cuDeviceGetCount()[1]) if int(status) == 0 else 0
    except Exception:  # no bindings, or no driver library
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("cuda") for item in items) and not gpu_count():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
