import numpy as np
import pytest

from kdgen.errors import SpecError
from kdgen.spec import load_spec
from kdgen.sweep.load import load_sweep
from kdgen.sweep.workloads import Memo, WorkloadSource, choose_shapes, facts_of
from kdgen.targets import get_target
from tests.sweep.fakes import ROOT, SWEEPS, load_small, write_sweep

H200 = get_target("sm_90")


def faults(path, target=H200):
    with pytest.raises(SpecError) as caught:
        load_sweep(path, target)
    return str(caught.value)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_the_shipped_sweeps_have_configurations_for_both_cards(path, arch):
    spec = load_sweep(path, get_target(arch))
    valid = 0
    for point in range(spec.space.size):
        values = spec.space.values(point)
        if not spec.space.broken_rule(values):
            valid += 1
            if valid < 40:  # constraints say what the families would refuse
                spec.kernel_of(values)
    assert valid >= (18 if path.stem == "tree_build" else 100 if path.stem != "moe_down" else 40)
    assert not spec.space.broken_rule(spec.incumbent)
    assert len(spec.digest()) == 64


def test_all_faults_of_a_file_are_reported_together(tmp_path):
    said = faults(
        write_sweep(
            tmp_path,
            "  tile.m: [64]\n  stages: []\n  slices: [1, 1]\n  warps.n: {from: 1, to: 4, when: 'stages > no_such'}\n"
            "  warps.k: {values: [1, 2], when: 'few_rows > 1'}\n  few_rows: [0, 8]\n",
            constraints="  - 'tile.n * nothing > 3'\n  - '__import__(1)'\n",
        )
    )
    assert "sweep.yaml:5: space.tile.m: no such parameter of the base spec; near: tile" in said
    assert "space.stages: has no values; give at least one" in said
    assert "space.slices: has the value 1 twice" in said
    assert "space.warps.n.when: unknown name 'no_such'" in said
    assert "space.warps.k.when: unknown name 'few_rows'" in said, "conditions see the parameters above alone"
    assert "constraints[0]: unknown name 'nothing' in 'tile.n * nothing > 3'" in said
    assert "constraints[1]: '__import__(1)' is not allowed in an expression" in said


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("  stages: {from: 1}\n", "a range needs from and to"),
        ("  stages: {values: [2], from: 1, to: 2}\n", "either values, or from and to"),
        ("  stages: {from: 1, to: 1000000000}\n", "a range of 1,000,000,000 values; at most 4,096 are allowed"),
        ("  stages: {from: 5, to: 4}\n", "has no values"),
        ("  stages: {from: 0, to: 8, times: 2}\n", "must start at 1 or more"),
        ("  stages: 4\n", "space.stages: value 4"),
        ("  {}\n", "space"),
    ],
)
def test_bad_values_are_refused(tmp_path, space, message):
    assert message in faults(write_sweep(tmp_path, space))


def test_ranges(tmp_path):
    spec, _ = load_small(tmp_path, "  stages: {from: 2, to: 8, step: 3}\n  n: {from: 16, to: 64, times: 2}\n")
    assert [axis.values for axis in spec.space.axes] == [(2, 5, 8), (16, 32, 64)]


def test_bases_that_are_missing_or_no_kernel(tmp_path):
    path = write_sweep(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("small.yaml", "absent.yaml"))
    assert "absent.yaml: no such file" in faults(path)
    path.write_text(text.replace("base: small.yaml", f"base: {ROOT / 'specs/engines/tiny.yaml'}"))
    said = faults(path)
    assert "is an engine spec; allowed: a kernel spec" in said or "tiny.yaml" in said
    path.write_text(text.replace("kind: sweep", "kind: kernel"))
    assert "kind: value 'kernel', allowed sweep" in faults(path)


def test_shapes_that_no_workload_has(tmp_path):
    with pytest.raises(SpecError, match=r"shapes\[0\]\.T: value 7, allowed: 1, 8, 16, 32, 64"):
        load_small(tmp_path, shapes="  - {T: [7]}\n")
    with pytest.raises(SpecError, match=r"shapes\[0\]\.context: value 1024, the family's workloads have no such size"):
        load_small(tmp_path, shapes="  - {T: [1], context: [1024]}\n")
    with pytest.raises(SpecError, match="asks for 'T = 1', which an entry above asks for already"):
        load_small(tmp_path, shapes="  - {T: [1]}\n  - {T: [1, 8]}\n")
    assert "shapes need at least one of T, context, B, names" in faults(write_sweep(tmp_path, shapes="  - {weight: 1.0}\n"))


def test_a_name_says_what_a_workload_is():
    assert facts_of("8k, T = 16") == {"name": "8k, T = 16", "T": 16, "context": 8192}
    assert facts_of("T = 8, skewed")["T"] == 8


def test_the_spec_hash_is_of_what_decides_times(tmp_path):
    first, _ = load_small(tmp_path)
    other, _ = load_small(tmp_path, "  few_rows: [0]\n  stages: [2]\n  slices: [8, 2]\n", shapes="  - {T: [1]}\n")
    assert first.digest() == other.digest(), "values, constraints and shapes may change; rows are found again"
    assert load_sweep(first.path, get_target("sm_120")).digest() != first.digest()
    more, _ = load_small(tmp_path, "  stages: [2]\n")
    assert more.digest() != first.digest()


def test_workloads_are_made_again_only_for_what_they_read():
    kernel = load_spec(ROOT / "specs" / "kernels" / "tree_attention.yaml").kernels[0]
    made = []
    memo = Memo()

    def make(params):
        made.append(params.stages if False else params.key_tile)
        return object()

    first = memo.get("x", kernel.params, make)
    assert memo.get("x", kernel.with_params(stages=5).params, make) is first
    assert memo.get("y", kernel.params, make) is not first
    assert memo.get("x", kernel.with_params(key_tile=32).params, make) is not first
    assert made == [16, 16, 32]


def test_light_workloads_keep_plans_and_sizes():
    kernel = load_spec(ROOT / "specs" / "kernels" / "tree_attention.yaml").kernels[0]
    source = WorkloadSource(0, light=True)
    name = "1k, T = 8"
    light = source.get(kernel, (name,))[name]
    full = WorkloadSource(0).get(kernel, (name,))[name]
    assert light.inputs["cache"].nbytes == full.inputs["cache"].nbytes
    assert light.inputs["cache"].strides == (0, 0, 0)
    assert np.array_equal(light.inputs["units"], full.inputs["units"])
    assert source.get(kernel.with_params(stages=5, copy_method="cp_async"), (name,))[name] is light
    assert source.get(kernel.with_params(key_tile=32), (name,))[name] is not light
    assert choose_shapes([name], load_sweep(SWEEPS[3], H200).shapes[:0], load_sweep(SWEEPS[3], H200).document) == ()
