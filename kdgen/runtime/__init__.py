"""The thin runtime: load built kernels and launch them, on a GPU or on the host.

    kit = kdgen.load("generated/kimi-k2.6", device="cuda")
    build = kit["tree_build"]
    out = build.allocate(S=4)
    build(log_probs, token_ids, root_tokens, starts, budgets, **out, stream=stream)

It needs numpy and ml_dtypes, and cuda-python for a GPU; never the compiler. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdgen.runtime.array import Array as Array
    from kdgen.runtime.call import BoundCall as BoundCall
    from kdgen.runtime.device import Device as Device
    from kdgen.runtime.device import Event as Event
    from kdgen.runtime.device import Graph as Graph
    from kdgen.runtime.device import Stream as Stream
    from kdgen.runtime.host_library import sanitizer_environment as sanitizer_environment
    from kdgen.runtime.kit import Kernel as Kernel
    from kdgen.runtime.kit import Kit as Kit
    from kdgen.runtime.kit import load as load
    from kdgen.runtime.open import open_device as open_device

_PLACES = {
    "Array": "array", "BoundCall": "call", "Device": "device", "Event": "device", "Graph": "device", "Kernel": "kit", "Kit": "kit",
    "Stream": "device", "load": "kit", "open_device": "open", "sanitizer_environment": "host_library",
}  # fmt: skip

__all__ = [
    "Array", "BoundCall", "Device", "Event", "Graph", "Kernel", "Kit", "Stream", "load", "open_device", "sanitizer_environment",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
