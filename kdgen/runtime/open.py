"""Opening devices by name."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from kdgen.errors import DeviceError

if TYPE_CHECKING:
    from kdgen.runtime.device import Device


@functools.cache
def gpu_count() -> int:
    """How many GPUs this process sees; 0 too when the driver or cuda-python is missing."""
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
        return int(driver.cuDeviceGetCount()[1]) if int(status) == 0 else 0
    except Exception:  # no package, no libcuda, a broken driver: each raises something else, and all mean the same
        return 0


def open_device(name: str = "auto", **host_options: Any) -> Device:
    """Open a device.

    Args:
        name: `cuda` (GPU 0), `cuda:N`, `host`, `host_asan` (the host, preferring sanitizer builds), or `auto`: a GPU when there is one,
            else the host.
        host_options: `order`, `copies`, `seed`, `threads` of `HostDevice`.

    Raises:
        DeviceError: there is no such device, or options are given for a GPU.
    """
    if name == "auto":
        name = "cuda" if gpu_count() and not host_options else "host"
    if name in ("host", "host_asan"):
        from kdgen.runtime.host import HostDevice

        try:
            return HostDevice(**host_options, sanitize=name == "host_asan")
        except TypeError as error:
            raise DeviceError(f"the host device has no such option: {error}; it has order, copies, seed, threads") from error
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(f"unknown device '{name}'; allowed: auto, host, host_asan, cuda, cuda:N")
    if host_options:
        raise DeviceError(f"device '{name}' takes no options; {', '.join(host_options)} are the host's")
    from kdgen.runtime.cuda import CudaDevice

    return CudaDevice(int(match[1] or 0))
