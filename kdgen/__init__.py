"""kdgen: YAML kernel specs to CUDA cubins, a thin runtime for them, and a row-exact speculative-decoding engine.

    kit = kdgen.load("generated/kimi-k2.6", device="cuda")
    kit["tree_build"](log_probs, tokens, ..., stream=stream)

Importing this package loads nothing heavy: neither numpy nor cuda-python nor the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kdgen.runtime import load as load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from kdgen.runtime import load

        return load
    raise AttributeError(f"module 'kdgen' has no attribute '{name}'")
