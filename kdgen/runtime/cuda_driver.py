"""The CUDA driver's calls with their errors in plain words. Importing this module needs `cuda-core` and `cuda-bindings`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kdgen.errors import DeviceError

try:
    from cuda import core
    from cuda.bindings import driver
except ImportError as error:
    raise DeviceError(f"running on a GPU needs cuda-python ({error}): pip install 'kdgen[cuda]'") from error

__all__ = ["check", "core", "driver", "driver_version", "plain_errors"]

_LOST = "this process cannot use the GPU any more"
_SEARCH = "find the place with: compute-sanitizer python …"
#: What a user can do about the errors that are met most.
_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU's memory is full; free arrays or use a smaller batch",
    "CUDA_ERROR_ILLEGAL_ADDRESS": f"a kernel went outside its arrays, now or in an earlier launch; {_LOST}; {_SEARCH}",
    "CUDA_ERROR_MISALIGNED_ADDRESS": f"a kernel used a misaligned address; {_LOST}",
    "CUDA_ERROR_LAUNCH_FAILED": f"a kernel crashed; {_LOST}; {_SEARCH}",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display's watchdog allows",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "a cooperative launch must fit on the GPU all at once; use fewer rows, or smaller tiles",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "this is not possible while a graph is being captured",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an operation inside the capture was not allowed; only launches are",
    "CUDA_ERROR_INVALID_CONTEXT": "the stream belongs to another device",
}


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call's result tuple; DeviceError, saying what was being done, when the call failed."""
    status = result[0]
    if status != 0:
        raise DeviceError(f"{doing}: {explain(status)}")
    return result[1] if len(result) > 1 else None


def explain(status: Any) -> str:
    """A driver status in words."""
    name, text = driver.cuGetErrorName(status)[1], driver.cuGetErrorString(status)[1]
    name = name.decode() if name else f"CUDA error {int(status)}"
    remedy = _REMEDIES.get(name)
    return f"{name} ({text.decode() if text else 'unknown'}){f'; {remedy}' if remedy else ''}"


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Turn what cuda.core raises into a DeviceError that says what was being done."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:  # cuda.core's own classes are private, and it raises RuntimeError and others beside them
        raise DeviceError(f"{doing}: {error}") from error


def driver_version() -> str:
    """The newest CUDA version that the driver knows, such as `13.0`."""
    version = int(check(driver.cuDriverGetVersion(), "asking for the driver's version"))
    return f"{version // 1000}.{version % 1000 // 10}"
