"""Parameter sweeps: a space around a base spec, taken stage by stage to the configurations that are right and fast.

    spec = load_sweep("specs/sweeps/gemm.yaml", get_target("sm_120"))
    with Store(Path("sweeps/gemm")) as store, Compiler() as compiler:
        Sweep(spec, shapes, store, place, compiler).run(make_strategy("grid", spec.space, 0, None), Budget(), 64)

Nothing is timed when an engine runs: a sweep's result is a spec (`kdgen sweep apply`) that engine specs name as they name any other.
"""

from __future__ import annotations

from kdgen.sweep.choose import Choice, choose
from kdgen.sweep.compiling import Compiler
from kdgen.sweep.load import SweepSpec, load_sweep
from kdgen.sweep.run import Budget, Outcome, Sweep
from kdgen.sweep.search import STRATEGIES, make_strategy
from kdgen.sweep.space import Space
from kdgen.sweep.stages import Row, Stage
from kdgen.sweep.store import Place, Store

__all__ = [
    "STRATEGIES",
    "Budget",
    "Choice",
    "Compiler",
    "Outcome",
    "Place",
    "Row",
    "Space",
    "Stage",
    "Store",
    "Sweep",
    "SweepSpec",
    "choose",
    "load_sweep",
    "make_strategy",
]
