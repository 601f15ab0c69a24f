import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.errors import ArtifactError, UsageError
from kdgen.kernels import get_family
from kdgen.spec import KernelSpec, Spec
from kdgen.verify.ddtree_cases import DdtreeCase, load_cases
from kdgen.verify.ddtree_check import CaseVerdict, check_case, draft_of
from kdgen.verify.schedules import host_schedules
from kdgen.verify.tree_step import TreeKernels
from tests.verify.fakes import FakeKernel, Sabotage

CASES_FILE = Path(__file__).parents[1] / "golden" / "ddtree_cases.json"
CASES = {case.name: case for case in load_cases(CASES_FILE)}


def kernel(family: str, **params: Any) -> KernelSpec:
    return KernelSpec(family, get_family(family), get_family(family).params.model_validate(params))


def spec(**build: Any) -> Spec:
    sizes = {"depth": 7, "top_k": 8, "budget": 64, **build}
    kernels = (
        kernel("tree_build", **sizes),
        kernel("tree_accept", depth=sizes["depth"], budget=sizes["budget"]),
        kernel("kv_compact", layers=2, width=8, depth=sizes["depth"], page_size=16, max_pages=512),
    )
    return Spec("test", "kernel", "test.yaml", "", ("host",), kernels)


def check(case: DdtreeCase, given: Spec, **sabotage: Sabotage) -> CaseVerdict:
    kernels = TreeKernels.for_draft(given, draft_of(case), case.start + case.nodes)
    kit: Any = {item.name: FakeKernel(item, sabotage.get(item.family.name, lambda results: None)) for item in kernels.kernels}
    return check_case(case, kernels, dict.fromkeys(host_schedules(2, 0), kit), lambda *launch: None)


@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees_with_the_references(name: str) -> None:
    verdict = check(CASES[name], spec())
    assert verdict.failures == ()
    assert verdict.error < 1e-6
    # Cases with other options cannot run on the spec's own kernels; the verdict must say so.
    assert bool(verdict.changes) == (name in ("chain_seed_B5", "depth_bonus_0p2"))


def test_larger_cases_run_on_variants() -> None:
    verdict = check(CASES["rand_L7_K8_B64"], spec(depth=3, top_k=4, budget=8))
    assert verdict.passed
    assert "tree_build depth=7, top_k=8, budget=64" in verdict.changes
    assert "tree_accept depth=7, budget=64" in verdict.changes
    assert "kv_compact depth=7" in verdict.changes


def test_kernels_that_do_not_match_each_other_are_adapted() -> None:
    given = spec()
    odd = Spec("test", "kernel", "t.yaml", "", ("host",), (given.kernels[0], kernel("tree_accept", depth=5, budget=9), given.kernels[2]))
    kernels = TreeKernels.for_draft(odd, draft_of(CASES["budget0"]), 200)
    assert kernels.changes == "tree_accept depth=7, budget=64"
    assert kernels.build is given.kernels[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("width_cap", 2), ("pad", True), ("chain_seed", True), ("depth_bonus", 0.5)],
)
def test_options_of_the_spec_never_reach_a_case_without_them(name: str, value: Any) -> None:
    verdict = check(CASES["worked_L3_K3_B6"], spec(**{name: value}))
    assert verdict.passed
    assert name in verdict.changes


def test_missing_family() -> None:
    given = spec()
    with pytest.raises(UsageError, match="has no kv_compact"):
        TreeKernels.for_draft(Spec("t", "kernel", "t.yaml", "", ("host",), given.kernels[:2]), draft_of(CASES["budget0"]), 10)


def bump(name: str, *index: int) -> Sabotage:
    def hurt(results: dict[str, np.ndarray]) -> None:
        results[name][index] += 1

    return hurt


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("tokens", (0, 2), r"tokens\[2\]: got 22, want 21"),
        ("positions", (0, 3), r"positions\[3\]: got 102, want 101"),
        ("depths", (0, 3), r"depths\[3\]"),
        ("parents", (0, 4), r"parents\[4\]: got 3, want 2"),
        ("node_ranks", (0, 3), r"ranks of node 3: got \[2\], want \[1\]"),
        ("scores", (0, 1), r"scores\[1\]"),
        ("paths_out", (0, 4, 2), r"path of node 4"),
        ("first_child", (0, 1), r"first_child\[1\]: got 3, want 2"),
        ("next_sibling", (0, 1), r"next_sibling\[1\]: got 4, want 3"),
        ("counts", (0,), r"counts: got 8 nodes, want 7"),
    ],
)
def test_wrong_tree_is_found(name: str, index: tuple[int, ...], message: str) -> None:
    verdict = check(CASES["worked_L3_K3_B6"], spec(), tree_build=bump(name, *index))
    assert any(re.search(message, text) for text in verdict.failures), verdict.failures


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("accepted", (0, 2), "accepted: got"),
        ("committed", (0, 1), "committed: got"),
        ("accepted_counts", (0,), "acceptance length: got 4, want 3"),
        ("next_roots", (0,), "bonus token: got 62, want 61"),
        ("next_starts", (0,), "new start: got 104, want 103"),
    ],
)
def test_wrong_walk_is_found(name: str, index: tuple[int, ...], message: str) -> None:
    verdict = check(CASES["worked_L3_K3_B6"], spec(), tree_accept=bump(name, *index))
    assert any(message in text for text in verdict.failures), verdict.failures


def in_cache(change: Callable[[np.ndarray], None]) -> Sabotage:
    def hurt(results: dict[str, np.ndarray]) -> None:
        words = results["cache"].view(np.uint16)
        change(words)

    return hurt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Position 105, page 6 of 16 rows, is the first of the sequence's pages; page 0 belongs to nobody.
        (lambda words: words[:, 0].__setitem__((slice(None), 3), 1), "a page that is not the sequence's"),
        (lambda words: words[0, 1, 6].__setitem__(0, words[0, 1, 6, 0] ^ 1), "in at least one of 2 layers"),
        (lambda words: words[:, 1, 7].__setitem__(slice(None), words[:, 1, 9]), "want [(105, 102)]"),
    ],
)
def test_wrong_moves_are_found(change: Callable[[np.ndarray], None], message: str) -> None:
    verdict = check(CASES["worked_L3_K3_B6"], spec(), kv_compact=in_cache(change))
    assert any("cache moves" in text and message in text for text in verdict.failures), verdict.failures


def test_swizzled_cache() -> None:
    given = spec()
    compact = kernel("kv_compact", layers=2, width=64, depth=7, page_size=16, max_pages=512, swizzle=True)
    verdict = check(CASES["worked_L3_K3_B6"], Spec("t", "kernel", "t.yaml", "", ("host",), (*given.kernels[:2], compact)))
    assert verdict.failures == ()


def test_bad_files(tmp_path: Path) -> None:
    good = json.loads(CASES_FILE.read_text())

    def refused(change: Callable[[dict[str, Any]], None]) -> str:
        document = copy.deepcopy(good)
        change(document)
        path = tmp_path / "cases.json"
        path.write_text(json.dumps(document))
        with pytest.raises(ArtifactError) as caught:
            load_cases(path)
        return str(caught.value)

    assert "format is 'x'; allowed: 'ddtree-oracle-v1'" in refused(lambda d: d.update(format="x"))
    assert "holds no cases" in refused(lambda d: d.update(cases=[]))
    assert "case worked_L3_K3_B6: lacks 'parents'" in refused(lambda d: d["cases"][0]["output"].pop("parents"))
    assert "positions has 6 entries for 7 nodes" in refused(lambda d: d["cases"][0]["output"]["positions"].pop())
    assert "tau_this_round 9" in refused(lambda d: d["cases"][0]["verify"].update(tau_this_round=9))
    assert "must both be [L][K]" in refused(lambda d: d["cases"][0]["input"].update(top_tokens=[[1]]))
    assert "case number 0" in refused(lambda d: d.update(cases=[3]))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ArtifactError, match="not a JSON file"):
        load_cases(tmp_path / "text.json")
    with pytest.raises(ArtifactError, match=r"nothing\.json: cannot be read"):
        load_cases(tmp_path / "nothing.json")
