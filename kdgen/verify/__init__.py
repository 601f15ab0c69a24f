"""Verification: every kernel of a spec against its numpy reference, and worked DDTree cases through the kernels.

for verdict in verify_spec(load_spec("specs/engines/kimi-k2.6.yaml"), device="host"):
    print(verdict.kernel, verdict.passed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdgen.verify.ddtree_check import CaseVerdict as CaseVerdict
    from kdgen.verify.kernel import Verdict as Verdict
    from kdgen.verify.run import verify_cases as verify_cases
    from kdgen.verify.run import verify_spec as verify_spec

__all__ = ["CaseVerdict", "Verdict", "verify_cases", "verify_spec"]

_HOMES = {
    "CaseVerdict": "kdgen.verify.ddtree_check", "Verdict": "kdgen.verify.kernel", "verify_cases": "kdgen.verify.run",
    "verify_spec": "kdgen.verify.run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # numpy and the runtime are loaded when something is used, not when this package is imported.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kdgen.verify' has no attribute '{name}'")
