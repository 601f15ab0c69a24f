import dataclasses

import numpy as np
import pytest

from kdgen.errors import KernelFault, LaunchError
from kdgen.kernels.base import Tolerance
from kdgen.kernels.tree_build import FAMILY
from kdgen.spec import KernelSpec
from kdgen.verify.kernel import Verdict, verify_kernel
from kdgen.verify.schedules import host_schedules
from tests.verify.fakes import FakeKernel, Sabotage

SPEC = KernelSpec("tree", FAMILY, FAMILY.params.model_validate({"depth": 3, "top_k": 4, "budget": 6, "sequences": 4}))


def run(*sabotages: Sabotage, spec: KernelSpec = SPEC) -> tuple[Verdict, list[tuple[str, str, str]]]:
    seen: list[tuple[str, str, str]] = []
    builds = {schedule: FakeKernel(spec, hurt) for schedule, hurt in zip(host_schedules(len(sabotages), 0), sabotages, strict=True)}
    verdict = verify_kernel(spec, builds, 0, lambda *launch: seen.append(launch))  # type: ignore[arg-type]
    return verdict, seen


def right(results: dict[str, np.ndarray]) -> None:
    pass


def test_right_kernel_passes() -> None:
    verdict, seen = run(right, right, right)
    assert verdict.passed
    assert verdict.cases >= 8
    assert (verdict.schedules, verdict.error, verdict.bound) == (3, 0.0, 0.0)
    assert verdict.regroupings == 2 * verdict.cases
    assert len(seen) == 3 * verdict.cases + verdict.regroupings
    assert seen[0][0] == "tree"


def test_wrong_kernel_fails_with_the_first_difference() -> None:
    def wrong(results: dict[str, np.ndarray]) -> None:
        results["tokens"][min(1, len(results["tokens"]) - 1), 2] += 1

    verdict, _ = run(wrong, wrong)
    assert not verdict.passed
    assert len(verdict.failures) == verdict.cases
    assert "tokens[1, 2]: got " in verdict.failures[0]


def test_result_that_changes_with_the_schedule_is_its_own_fault() -> None:
    def other(results: dict[str, np.ndarray]) -> None:
        results["depths"][0, 1] = 3

    verdict, _ = run(right, right, other)
    assert "changes with the schedule" in verdict.failures[0]
    assert "depths[0, 1]" in verdict.failures[0]
    assert "random" in verdict.failures[0]


def test_change_within_tolerance_still_fails() -> None:
    loose = dataclasses.replace(FAMILY, tolerances=lambda params: {"scores": Tolerance(0.5, "test")})
    spec = dataclasses.replace(SPEC, family=loose)

    def nudge(results: dict[str, np.ndarray]) -> None:
        finite = np.isfinite(results["scores"])
        results["scores"][finite] *= 1 + 1e-12

    same, _ = run(nudge, nudge, spec=spec)
    assert same.passed
    assert 0 < same.error < 1e-11
    assert same.bound == 0.5
    verdict, _ = run(right, nudge, spec=spec)
    assert "changes with the schedule" in verdict.failures[0]


def test_output_that_is_never_written_is_found_even_where_minus_one_is_right() -> None:
    def forget(results: dict[str, np.ndarray]) -> None:
        del results["next_sibling"]

    verdict, _ = run(forget, forget)
    assert "next_sibling" in verdict.failures[0]
    assert "never written" in verdict.failures[0]


def test_fault_stops_the_kernel_and_is_reported() -> None:
    def fault(results: dict[str, np.ndarray]) -> None:
        raise KernelFault("deadlock: thread 3 waits")

    verdict, seen = run(right, fault)
    assert len(verdict.failures) == 1
    assert "deadlock: thread 3 waits" in verdict.failures[0]
    assert "reversed" in verdict.failures[0]
    assert len(seen) == 2


def test_refused_launch_is_a_failure_of_its_case() -> None:
    def refuse(results: dict[str, np.ndarray]) -> None:
        raise LaunchError("S = 9 is too many")

    verdict, _ = run(refuse)
    assert len(verdict.failures) == verdict.cases
    assert "refused: S = 9" in verdict.failures[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_seed_decides_the_inputs(seed: int) -> None:
    inputs = [next(FAMILY.cases(SPEC.params, np.random.default_rng(s))).inputs["token_ids"] for s in (0, seed)]
    assert np.array_equal(*inputs) == (seed == 0)
