"""`kdgen bench`: how long a spec's kernels take on a GPU, as shares of what it can do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kdgen.cli.build import SetOption, SpecPath
from kdgen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kdgen.spec import Spec


def bench(
    spec: SpecPath,
    *,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cuda or cuda:N.")] = "cuda",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the workloads' inputs.")] = 0,
    launches: Annotated[int, typer.Option("--launches", min=1, max=10_000, help="Launches in the graph that is replayed.")] = 200,
    replays: Annotated[int, typer.Option("--replays", min=3, max=10_000, help="Replays; the median is reported.")] = 21,
    only: Annotated[str, typer.Option("--only", metavar="REGEX", help="Time only the workloads that match `KERNEL WORKLOAD`.")] = "",
    sustained: Annotated[
        float, typer.Option("--sustained", metavar="SECONDS", min=0.0, max=600.0, help="Also time under load of so many seconds.")
    ] = 0.0,
    step: Annotated[
        str, typer.Option("--step", metavar="ROWS", help="Of an engine spec: a rank's whole forward of so many rows, as 1,8,16,32.")
    ] = "",
    context: Annotated[int, typer.Option("--context", min=0, max=1 << 20, help="Tokens before the rows of --step.")] = 8192,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the results, as a PNG.")] = None,
    overrides: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Time every kernel of a spec on a GPU: replays of one captured graph, medians, shares of the measured ceilings.

    Public kernels that are installed are checked and timed beside ours. The read and mma ceilings are measured in the same run. Inputs
    that come from memory in the engine are rotated through copies larger than the L2 cache.

    Example: kdgen bench specs/kernels/tree_build.yaml --device cuda
    """
    from kdgen.bench.run import Bench
    from kdgen.spec import load_spec

    if step:
        _step(load_spec(str(spec), overrides or ()), device, seed, step, context, replays, json)
        return
    with Bench(load_spec(str(spec), overrides or ()), device, seed) as run:
        results = list(run.results(launches, replays, only, sustained))
    if plot is not None:
        from kdgen.bench.plot import draw

        draw(results, f"{run.spec.name} on {run.target.name}", plot)
    if json:
        ceilings = {"read": run.ceilings.read, "mma": run.ceilings.mma}
        document = {"spec": run.spec.name, "target": run.target.name, "ceilings": ceilings, "results": [r.to_json() for r in results]}
        print_json({**document, "absent": list(run.absent), "refused": run.refused})
        return
    print(f"ceilings measured in this run: read {run.ceilings.read / 1e9:,.0f} GB/s, mma.sync bf16 {run.ceilings.mma / 1e12:,.0f} TFLOP/s")
    rows = [
        [
            r.kernel, r.workload, f"{r.timing.median:.2f}", f"{r.timing.low:.2f}-{r.timing.high:.2f}",
            f"{r.bandwidth / 1e9:,.0f} ({r.read_share:.0%})" if r.bandwidth else "",
            f"{r.rate / 1e12:,.1f} ({r.mma_share:.0%})" if r.rate else "",
            *([f"{r.timing.sustained:.2f}" if r.timing.sustained else ""] if sustained else []),
        ]
        for r in results
    ]  # fmt: skip
    right = ("µs", "10-90 %", "GB/s (of read)", "TFLOP/s (of mma)", *(["sustained µs"] if sustained else []))
    print_table("", ("kernel", "workload", *right), rows, right=right)
    if run.absent:
        print(f"not installed: {', '.join(run.absent)}")
    for name, reason in run.refused.items():
        print(f"not timed: {name}, {reason}")


def _step(spec: Spec, device: str, seed: int, rows: str, context: int, replays: int, json: bool) -> None:
    """A rank's forward: its share of the read ceiling, and the kernels that take longest."""
    import numpy as np

    from kdgen.bench.run import Bench
    from kdgen.bench.step import StepBench
    from kdgen.errors import UsageError

    try:
        sizes = tuple(int(count) for count in rows.split(","))
    except ValueError as error:
        raise UsageError(f"--step {rows}: give numbers of rows, as 1,8,16,32") from error
    with Bench(spec, device, seed) as run:
        made = StepBench(run.kit, spec, run.device, context, np.random.default_rng(seed))
        steps = list(made.steps(sizes, 1, replays))
    read = run.ceilings.read
    if json:
        print_json({"spec": spec.name, "read": read, "weights": made.weights.nbytes, "steps": [asdict(step) for step in steps]})
        return
    print(f"read ceiling of this run {read / 1e9:,.0f} GB/s; weights {made.weights.nbytes / 1e9:.1f} GB, context {context:,}")
    table = []
    for one in steps:
        floor, parts = one.moved_bytes / read * 1e6, sum(one.parts.values())
        table.append([
            str(one.rows), f"{one.timing.median / 1e3:.3f}", f"{floor / 1e3:.3f} ({floor / one.timing.median:.0%})",
            f"{one.experts:.1f}", f"{parts / 1e3:.3f}",
        ])  # fmt: skip
    right = ("rows", "ms", "floor ms (share)", "experts a layer", "sum of kernels ms")
    print_table("", right, table, right=right)
    for one in steps:
        longest = sorted(one.parts.items(), key=lambda item: -item[1])
        print(f"T = {one.rows}: " + ", ".join(f"{name} {time / 1e3:.3f}" for name, time in longest[:12]) + " ms")
