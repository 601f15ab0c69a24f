"""The host target must find what a GPU hides: each fault is planted in a real template and must be reported.

Every case edits one kernel's template, builds it, and verifies it like any user would; the unedited kernels pass the same runs.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdgen.render import data
from kdgen.render import source as render_source
from kdgen.runtime import sanitizer_environment
from kdgen.spec import load_spec
from kdgen.verify import verify_spec

ROOT = Path(__file__).parents[2]

SPECS = {
    "gemm_probe": "params: {n: 32, k: 256, rows: 16, tile: {n: 32, t: 8, k: 32}, stages: 3}",
    "primitives": "params: {blocks: 2}",
    "tree_accept": "params: {depth: 3, budget: 8, sequences: 2}",
    "tree_build": "params: {depth: 3, top_k: 4, budget: 8, sequences: 2}",
}


@dataclass(frozen=True)
class Fault:
    family: str
    old: str
    new: str
    report: str


FAULTS = {
    "missing barrier": Fault(
        "primitives", "  exchange[thread] = mine;\n  kd::block_sync();\n", "  exchange[thread] = mine;\n", "changes with the schedule|got"
    ),
    "missing warp barrier": Fault(
        "tree_accept",
        "  kd::warp_sync();\n  KD_UNROLL\n"
        "  for (kd::u32 s = 0; s < slots; s++) {\n    const kd::u32 i = s * 32 + lane;\n    if (i < count) agrees",
        "  KD_UNROLL\n  for (kd::u32 s = 0; s < slots; s++) {\n    const kd::u32 i = s * 32 + lane;\n    if (i < count) agrees",
        "changes with the schedule|got",
    ),
    "missing cp.async wait": Fault("gemm_probe", "    kd::cp_async_wait<stages - 2>();\n", "", "nan|NaN|changes with the schedule"),
    "missing wait for a bulk copy": Fault(
        "gemm_probe",
        "    kd::barrier_wait(kd::shared_at(full_at + 8 * stage), step / stages & 1);\n",
        "",
        "nan|NaN|changes with the schedule|outside|more arrivals",
    ),
    "slot refilled before it was read": Fault(
        "gemm_probe",
        "    kd::block_sync();\n    if (step + stages - 1 < steps) fill(step + stages - 1);\n",
        "    if (step + stages - 1 < steps) fill(step + stages - 1);\n    kd::block_sync();\n",
        "nan|NaN|changes with the schedule|error",
    ),
    "collective reached by part of a warp": Fault(
        "primitives",
        "  put(kd::shfl_xor(mine, 5u));\n",
        "  if (lane != 9) put(kd::shfl_xor(mine, 5u));\n",
        "divergent collective|deadlock.*warp collective.*primitives.cu.j2",
    ),
    "two branches meet in one collective": Fault(
        "primitives",
        "  put(kd::shfl_xor(mine, 5u));\n",
        "  if (lane < 16)\n    put(kd::shfl_xor(mine, 5u));\n  else\n    put(kd::shfl_xor(mine, 5u));\n",
        "divergent collective.*primitives.cu.j2",
    ),
    "barrier reached by part of a block": Fault(
        "primitives",
        "  exchange[thread] = mine;\n  kd::block_sync();\n",
        "  exchange[thread] = mine;\n  if (thread < 33) kd::block_sync();\n  kd::warp_sync();\n",
        "deadlock.*thread.*(block barrier|warp collective) at templates/primitives.cu.j2|divergent collective",
    ),
    "uninitialised shared memory": Fault("primitives", "  exchange[thread] = mine;\n", "", "changes with the schedule|got"),
    "write past shared memory": Fault(
        "primitives",
        "  exchange[thread] = mine;\n",
        "  exchange[thread] = mine;\n  if (thread == 5) exchange[threads] = mine;\n",
        "past the end of a shared-memory region",
    ),
    "write past an output": Fault(
        "primitives", "  // ---- arithmetic\n", "  words[base + threads * {{ word_rows }} + thread] = 1;\n", "words"
    ),
    "wild address": Fault(
        "primitives", "  // ---- arithmetic\n", "  scratch[(1ll << 40) + thread] = 1;\n", "touched memory that does not exist"
    ),
    "endless wait": Fault(
        "primitives",
        "  // ---- arithmetic\n",
        "  if (thread == 0) while (kd::load_acquire(mailbox + 2) != 3) kd::spin_pause();\n",
        "waits forever",
    ),
    "barrier that was never initialised": Fault(
        "gemm_probe", "kd::barrier_init(kd::shared_at(full_at + 8 * s), 1)", "(void)0", "not initialised"
    ),
}


# Only a sanitizer sees these: the launch itself would go on with whatever it read.
SANITIZER_FAULTS = {
    "read past an input": Fault(
        "tree_accept",
        "    if (i < nodes) {\n      if (i < looked_at) choice[i]",
        "    if (i < nodes + 32) {\n      if (i < looked_at) choice[i]",
        "heap-buffer-overflow|use-after-poison|unknown-crash",
    ),
    "read past shared memory": Fault(
        "primitives", "put(exchange[threads - 1 - thread]);", "put(exchange[threads + 3 - thread]);", "use-after-poison"
    ),
    "read before the copy has landed": Fault("gemm_probe", "    kd::cp_async_wait<stages - 2>();\n", "", "use-after-poison"),
    "signed overflow": Fault(
        "tree_accept", "next_starts[sequence] = start +", "next_starts[sequence] = start * 2147483647 +", "signed integer overflow"
    ),
}


def plant(root, fault):
    """Copies the templates to `root`, edits one, writes its spec; returns (templates, spec file)."""
    templates = root / "templates"
    shutil.copytree(ROOT / "templates", templates)
    path = templates / f"{fault.family}.cu.j2"
    text = path.read_text()
    assert fault.old in text, f"{path.name} no longer holds the text this fault is planted in"
    path.write_text(text.replace(fault.old, fault.new, 1))
    spec = root / "spec.yaml"
    spec.write_text(f"kind: kernel\nname: {fault.family}\nfamily: {fault.family}\n{SPECS[fault.family]}\ntargets: [host]\n")
    return templates, spec


def verify(root, fault, **options):
    """Verifies the edited kernel; returns its verdict."""
    templates, spec = plant(root, fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "templates_dir", lambda: templates)
        patch.setattr(render_source, "templates_dir", lambda: templates)
        (verdict,) = verify_spec(load_spec(spec), "host", out=root / "out", **options)
    return verdict


@pytest.mark.parametrize("family", sorted(SPECS))
def test_unedited_kernels_pass(family, tmp_path):
    verdict = verify(tmp_path, Fault(family, "", "", ""), schedules=8)
    assert verdict.passed, verdict.failures


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_planted_fault_is_reported(name, tmp_path):
    fault = FAULTS[name]
    verdict = verify(tmp_path, fault, schedules=8)
    assert not verdict.passed
    assert re.search(fault.report, verdict.failures[0], re.DOTALL), verdict.failures[0]


@pytest.mark.parametrize("name", [None, *sorted(SANITIZER_FAULTS)])
def test_sanitizer_build(name, tmp_path):
    """A planted fault ends the process with the sanitizer's report; the four unedited kernels leave it nothing to say."""
    command = [sys.executable, "-m", __name__, name or "clean", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **sanitizer_environment()}, capture_output=True, text=True, check=False)
    if name is None:
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert done.returncode != 0
        assert re.search(SANITIZER_FAULTS[name].report, done.stderr), done.stderr[-3000:]


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    faults = [Fault(family, "", "", "") for family in SPECS] if what == "clean" else [SANITIZER_FAULTS[what]]
    for number, fault in enumerate(faults):
        (where / str(number)).mkdir()
        outcome = verify(where / str(number), fault, schedules=4, sanitize=True)
        if not outcome.passed:
            sys.exit(f"not by the sanitizer: {outcome.failures[0]}")
