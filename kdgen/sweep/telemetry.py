"""Clocks, temperature and throttling of a GPU, through the driver's own management library; nothing where that is missing."""

from __future__ import annotations

import ctypes
from typing import Any

#: Bits of NVML's "clocks event reasons" that mean the GPU is slower than it could be.
_SLOW = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake"}
_SM_CLOCK = 1


class Telemetry:
    """One GPU.

    Args:
        bus_id: its PCI bus id, such as `0000:1b:00.0`.
        library: the loaded NVML; None to look for it.
    """

    def __init__(self, bus_id: str, library: Any = None):
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        try:
            nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(self._handle)) == 0:
                self._library = nvml
        except (OSError, AttributeError):
            self._library = None

    def read(self) -> dict[str, Any]:
        """`clock_mhz`, `temperature` in °C, and `throttle`, a list of reasons; what cannot be read is left out."""
        if self._library is None:
            return {}
        found: dict[str, Any] = {}
        number, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(number)) == 0:
            found["clock_mhz"] = number.value
        if self._library.nvmlDeviceGetTemperature(self._handle, 0, ctypes.byref(number)) == 0:
            found["temperature"] = number.value
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle, ctypes.byref(reasons)) == 0:
            found["throttle"] = [name for bit, name in _SLOW.items() if reasons.value & bit]
        return found


def telemetry_of(device: Any) -> Telemetry:
    """Of an opened CUDA device."""
    try:
        bus_id = str(device.core.pci_bus_id)
    except Exception:  # another version of cuda.core may not know it; clocks are worth having, not failing for
        bus_id = ""
    return Telemetry(bus_id)
