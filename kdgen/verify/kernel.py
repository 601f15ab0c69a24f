"""Verification of one built kernel: every case of its family, on every schedule, against the family's reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kdgen.contract import Argument, Contract
from kdgen.errors import DeviceError, LaunchError
from kdgen.expressions import extent
from kdgen.kernels.base import EXACT, Case
from kdgen.verify.compare import Array, Difference, compare, filled, first_change
from kdgen.verify.rows import differing_row, regroupings, row_count, take_rows
from kdgen.verify.schedules import Schedule

if TYPE_CHECKING:
    from kdgen.runtime import Kernel
    from kdgen.spec import KernelSpec

#: Told before each launch what is about to run: kernel, case, schedule.
Watcher = Callable[[str, str, str], None]

#: What the runs of a case left behind, by schedule: argument name to array.
Results = dict[Schedule, dict[str, Array]]


@dataclass(frozen=True)
class Verdict:
    """What verification found out about one kernel.

    Attributes:
        kernel, family: names.
        cases, schedules: how many of each were run.
        regroupings: how many other groupings of the cases' rows were run, for a family whose rows must not influence each other.
        error: the largest error of any output that has a tolerance (see `kdgen.verify.compare`).
        bound: the bound of the output with that error; 0 when every output is exact.
        failures: one line for each case that failed; empty when the kernel passed.
    """

    kernel: str
    family: str
    cases: int
    schedules: int
    error: float
    bound: float
    failures: tuple[str, ...] = field(default=())
    regroupings: int = 0

    @property
    def passed(self) -> bool:
        """True when no case failed."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `error` is null when a result is no number or an exact output differs."""
        return {
            "kernel": self.kernel, "family": self.family, "cases": self.cases, "schedules": self.schedules,
            "error": self.error if np.isfinite(self.error) else None, "bound": self.bound, "passed": self.passed,
            "regroupings": self.regroupings, "failures": list(self.failures),
        }  # fmt: skip


def verify_kernel(spec: KernelSpec, builds: Mapping[Schedule, Kernel], seed: int, watch: Watcher, regroup: int = 2) -> Verdict:
    """Run all cases of `spec`'s family and compare.

    Args:
        spec: the kernel and its parameters.
        builds: the loaded kernel for each schedule, on a device set to that schedule.
        seed: of the case generator.
        watch: called before each launch.
        regroup: how many other groupings of each case's rows to run.
    """
    family, failures = spec.family, list[str]()
    worst, bound, count, regrouped = 0.0, 0.0, 0, 0
    order = np.random.default_rng(seed)
    for case in family.cases(spec.params, np.random.default_rng(seed)):
        count += 1
        try:
            results: Results = {}
            for schedule, kernel in builds.items():
                watch(spec.name, case.name, schedule.name)
                results[schedule] = run_case(kernel, case.inputs, family.dimensions(spec.params, case.inputs), schedule.fill)
            number, moved = _regroup(spec, case, builds, results, order, regroup, watch)
            regrouped += number
        except LaunchError as error:
            failures.append(f"case {case.name}: refused: {error}")
            continue
        except DeviceError as error:
            # The state of the device is unknown now: what later cases say would mean nothing.
            failures.append(f"case {case.name}, {schedule.name}: fault: {error}")
            break
        case_error, case_bound, failure = judge_case(spec, case, results)
        if case_error > worst or not bound:
            worst, bound = max(worst, case_error), case_bound
        if failure or moved:
            failures.append(f"case {case.name}: {failure or moved}")
    return Verdict(spec.name, family.name, count, len(builds), worst, bound, tuple(failures), regrouped)


def _regroup(
    spec: KernelSpec, case: Case, builds: Mapping[Schedule, Kernel], results: Results, rng: np.random.Generator, most: int, watch: Watcher
) -> tuple[int, str]:
    """Run other groupings of a case's rows, on the schedules in turn; returns (how many, what differs or "")."""
    family, count, turns = spec.family, 0, list(builds.items())
    if not family.rows:
        return 0, ""
    contract = turns[0][1].contract
    whole = results[turns[0][0]]
    for name, rows in regroupings(row_count(contract, family.rows, case.inputs), rng, most):
        schedule, kernel = turns[count % len(turns)]
        watch(spec.name, f"{case.name}, {name}", schedule.name)
        if family.take_rows:
            inputs = family.take_rows(spec.params, case.inputs, rows)
        else:
            inputs = take_rows(contract, family.rows, case.inputs, rows)
        part = run_case(kernel, inputs, family.dimensions(spec.params, inputs), schedule.fill)
        count += 1
        if difference := differing_row(contract, family.rows, whole, part, rows):
            return count, f"not row-exact: {difference} ({name}, {schedule.name})"
    return count, ""


def run_case(kernel: Kernel, inputs: Mapping[str, Array], dimensions: Mapping[str, int], fill: int) -> dict[str, Array]:
    """Launch a kernel once and wait for it.

    Args:
        kernel: loaded on some device.
        inputs: every `in`, `inout` and `scalar` argument.
        dimensions: those that no input binds.
        fill: byte that outputs and workspaces hold before.

    Returns:
        Every `out` and `inout` array as the kernel left it.
    """
    contract = kernel.contract
    known = bound_dimensions(contract, inputs, dimensions)
    arguments: dict[str, Any] = {}
    for argument in contract.arguments:
        if argument.role == "scalar":
            arguments[argument.name] = inputs[argument.name].item()
        elif argument.role in ("in", "inout"):
            arguments[argument.name] = kernel.device.array(inputs[argument.name])
        elif argument.role in ("out", "workspace"):
            arguments[argument.name] = kernel.device.array(_blank(argument, known, fill))
    kernel(**arguments, dims=dict(dimensions))
    kernel.device.synchronize()
    return {a.name: arguments[a.name].numpy().copy() for a in contract.arguments if a.role in ("out", "inout")}


def bound_dimensions(contract: Contract, inputs: Mapping[str, Array], extra: Mapping[str, int]) -> dict[str, int]:
    """The dimensions that a case's arrays bind (a bare symbol in a shape), and the `extra` ones."""
    known = dict(extra)
    for argument in contract.arguments:
        for symbol, size in zip(argument.shape, inputs[argument.name].shape if argument.name in inputs else (), strict=False):
            if isinstance(symbol, str) and symbol.isidentifier():
                known.setdefault(symbol, size)
    return known


def judge_case(spec: KernelSpec, case: Case, results: Results) -> tuple[float, float, str]:
    """Compare one case's results; returns (worst error, its bound, what is wrong or "")."""
    want = spec.family.reference(spec.params, case.inputs)
    tolerances = spec.family.tolerances(spec.params)
    (base, first), *others = results.items()
    if missing := sorted(set(first) - set(want)):
        return np.inf, 0.0, f"the reference of family {spec.family.name} does not say what {', '.join(missing)} must be"
    worst, bound, wrong = 0.0, 0.0, list[tuple[Schedule, Difference]]()
    for schedule, got in results.items():
        for name in got:
            outcome = compare(name, got[name], want[name], tolerances.get(name, EXACT), schedule.fill)
            if outcome.error > worst or not bound:
                worst, bound = max(worst, outcome.error), outcome.bound
            if outcome.difference:
                wrong.append((schedule, outcome.difference))
    # A result that one schedule gets right and another does not, or that differs within tolerance, is a fault of its own.
    for schedule, got in others:
        for name in got:
            change = first_change(name, first[name], got[name])
            if change and not any(difference.note for _, difference in wrong):
                return worst, bound, _schedule_fault(base, schedule, change)
    if wrong:
        schedule, difference = wrong[0]
        return worst, bound, f"{difference} ({schedule.name})"
    return worst, bound, ""


def _schedule_fault(base: Schedule, schedule: Schedule, change: Difference) -> str:
    place = f"{change.output}[{', '.join(map(str, change.index))}]"
    return (
        f"changes with the schedule: a barrier or a wait is missing? {place} is {change.want} ({base.name}) "
        f"but {change.got} ({schedule.name})"
    )


def _blank(argument: Argument, dimensions: Mapping[str, int], fill: int) -> Array:
    from kdgen.dtypes import numpy_dtype

    return filled(tuple(extent(size, dimensions) for size in argument.shape), numpy_dtype(argument.dtype), fill)
