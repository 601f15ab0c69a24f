"""`kdgen sweep`: good parameters for a kernel, found by timing on a GPU, or without one by a model of its machine code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kdgen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kdgen.sweep.recorded import Recorded
    from kdgen.sweep.run import Outcome

_TOP = 10


class _Group(TyperGroup):
    """Lets `kdgen sweep FILE …` stand for `kdgen sweep run FILE …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the name of the command that is meant when none is given."""
        if args and args[0] not in self.commands and args[0] not in ("--help",):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Find good parameters: compile, predict, time, choose.

    `kdgen sweep FILE --arch TARGET --out DIR` is short for `kdgen sweep run FILE …`; `kdgen sweep --replay DIR …` for
    `kdgen sweep run --replay DIR …`.

    Example: kdgen sweep specs/sweeps/gemm.yaml --arch sm_120 --out sweeps/gemm
    """,
)

StoreArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The --out directory of a sweep.", show_default=False)]
NameOption = Annotated[str, typer.Option("--name", metavar="SWEEP", help="Which stored sweep, by name.")]
OnOption = Annotated[str, typer.Option("--on", metavar="DEVICE", help="Which stored sweep, by its device as stored.")]
StoredArchOption = Annotated[str, typer.Option("--arch", metavar="TARGET", help="Which stored sweep, by target.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def parse_budget(text: str) -> tuple[int | None, float | None]:
    """`100` is so many configurations, `10m`, `90s`, `2h` is a time; returns (configurations, seconds)."""
    from kdgen.errors import UsageError

    if not text:
        return None, None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found and float(found[1]) > 0:
        return None, float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
    if re.fullmatch(r"[1-9]\d{0,8}", text):
        return int(text), None
    raise UsageError(f"--budget {text}: allowed are a number of configurations such as 100, or a time such as 90s, 10m, 2h")


@app.command("run")
def run(
    spec: Annotated[Path | None, typer.Argument(metavar="FILE", help="A sweep file (YAML).", show_default=False)] = None,
    *,
    arch: Annotated[str, typer.Option("--arch", metavar="TARGET", help="The GPU target to sweep for.")] = "",
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Time on cuda or cuda:N; none: the static model alone.")
    ] = "none",
    strategy: Annotated[str, typer.Option("--strategy", metavar="NAME", help="grid, random, halving or optuna.")] = "grid",
    budget: Annotated[str, typer.Option("--budget", metavar="N|TIME", help="So many configurations, or so long: 10m.")] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search, and of the workloads' inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the store and the report go; found there, work goes on.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Compile so many at once. Default: every core.")] = None,
    prune: Annotated[
        float, typer.Option("--prune", min=0.0, help="Do not time what is predicted to take so many times the best; 0: time all.")
    ] = 0.0,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what did not compile, launch or end in time before.")] = False,
    launches: Annotated[int, typer.Option("--launches", min=1, max=10_000, help="Launches in a graph.")] = 48,
    replays: Annotated[int, typer.Option("--replays", min=1, max=1000, help="Replays of each turn.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Turns with the base spec's own configuration.")] = 2,
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", min=1.0, help="For one check or timing, then it is ended.")] = 120.0,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="DIR", help="Search in stored results instead.")] = None,
    name: NameOption = "",
    on: OnOption = "",
    json: JsonOption = False,
) -> None:
    """Try the configurations of a sweep file, and rank them.

    Without a GPU every configuration is compiled, and its machine code says how long it would take. With one, correct configurations are
    timed in turns with the base spec's. Every step is stored at once: the same command goes on where a killed one stopped.

    Example: kdgen sweep specs/sweeps/tree_attention.yaml --arch sm_120 --out sweeps/attention
    """
    from kdgen.errors import UsageError

    if replay is not None:
        if spec is not None or out is not None or device != "none":
            raise UsageError("--replay needs no sweep file, --out or --device: it searches in what is stored")
        _replay(replay, strategy, seed, budget, name, on, arch, json)
        return
    if spec is None or not arch or out is None:
        missing = [text for text, given in (("FILE", spec), ("--arch", arch), ("--out", out)) if not given]
        raise UsageError(f"kdgen sweep needs {', '.join(missing)}; see kdgen sweep run --help")
    _sweep(spec, arch, device, strategy, budget, seed, out, jobs, prune, retry, (launches, replays, rounds), limit, json)


def _sweep(
    path: Path, arch: str, device: str, strategy: str, budget: str, seed: int, out: Path, jobs: int | None, prune: float, retry: bool,
    timing: tuple[int, int, int], limit: float, json: bool,
) -> None:  # fmt: skip
    from contextlib import ExitStack

    from kdgen.compile.identity import compiler_id
    from kdgen.errors import UsageError
    from kdgen.sweep.compiling import Compiler
    from kdgen.sweep.load import load_sweep
    from kdgen.sweep.recorded import document_of, read_place
    from kdgen.sweep.run import Budget, Sweep
    from kdgen.sweep.search import DEFAULT_BUDGET, make_strategy
    from kdgen.sweep.session import floors_of, measure_device, open_worker
    from kdgen.sweep.store import Place, Store
    from kdgen.sweep.workloads import WorkloadSource, choose_shapes
    from kdgen.targets import get_target

    target = get_target(arch)
    if target.is_host:
        raise UsageError(f"--arch {arch}: sweeps are for GPUs; the host target emulates arithmetic, not time")
    configurations, seconds = parse_budget(budget)
    spec = load_sweep(path, target)
    search = make_strategy(strategy, spec.space, seed, configurations)
    if configurations is None and seconds is None and (strategy == "optuna" or (strategy == "random" and spec.space.size > DEFAULT_BUDGET)):
        configurations = DEFAULT_BUDGET
    names = WorkloadSource(seed, light=True).names(spec.kernel, spec.shapes)
    shapes = choose_shapes(names, spec.shapes, spec.document)
    with ExitStack() as stack:
        store = stack.enter_context(Store(out))
        compiler = stack.enter_context(Compiler(jobs))
        worker, ceilings, label = None, dict[str, float](), f"none ({target.name})"
        if device != "none":
            worker = stack.enter_context(open_worker(device, shapes, seed, timing, limit))
            label, ceilings = measure_device(worker, target)
        place = Place(spec.digest(), label, compiler_id(target))
        floors = floors_of(spec, shapes, seed, ceilings)
        store.describe(place, spec.name, target.name, document_of(spec, shapes, floors, ceilings))
        listener = stack.enter_context(_Listener(json))
        sweep = Sweep(spec, shapes, store, place, compiler, worker=worker, prune=prune, seed=seed, retry=retry, listen=listener.hear)
        stack.callback(sweep.close)
        # A strategy that learns is asked for few at a time. A GPU should not wait for compilers, so much is compiled at once for it.
        cap = None if strategy == "halving" else configurations
        sweep.run(search, Budget(cap, seconds), 8 if strategy == "optuna" else 16 if worker is None else 64)
        listener.stop()
        recorded = read_place(store, place)
        stages = dict(sweep.count_stages())
    written = _write_report(recorded, out)
    _show(recorded, stages, written, json)
    _check_choice(recorded)


def _write_report(recorded: Recorded, out: Path) -> Path | None:
    from kdgen.errors import ToolchainError
    from kdgen.sweep.report import write_report

    try:
        return write_report(recorded, out)
    except ToolchainError as error:
        # The results are stored; only the pictures are missing.
        print(f"kdgen: no report: {error}", file=sys.stderr)
        return None


def _check_choice(recorded: Recorded) -> None:
    """KdgenError when the search ended with nothing to choose, with the reason most configurations have."""
    from collections import Counter

    from kdgen.errors import KdgenError
    from kdgen.sweep.choose import by_configuration, choose
    from kdgen.sweep.stages import WHOLE

    rows = by_configuration(recorded.rows)
    if choose(rows, recorded.incumbent, recorded.shapes, recorded.objective):
        return
    reasons = Counter(f"{own[WHOLE].stage}: {own[WHOLE].reason}".rstrip(": ") for own in rows.values() if WHOLE in own)
    listed = "\n".join(f"{count:,} × {reason}" for reason, count in reasons.most_common(5))
    raise KdgenError(f"none of {len(rows):,} configurations can be chosen:\n{listed}")


def _show(recorded: Recorded, stages: dict[str, int], written: Path | None, json: bool) -> None:
    from kdgen.sweep.choose import by_configuration, choose, correlations
    from kdgen.sweep.report import ranked, shown_values
    from kdgen.sweep.stages import WHOLE

    rows = by_configuration(recorded.rows)
    choices = choose(rows, recorded.incumbent, recorded.shapes, recorded.objective)
    every = ranked(recorded, rows)
    matching = correlations(rows, [shape.name for shape in recorded.shapes])
    if json:
        print_json(
            {
                "sweep": recorded.name, "target": recorded.target, "device": recorded.place.device, "spec": recorded.place.spec,
                "toolchain": recorded.place.toolchain, "measured": recorded.measured, "points": recorded.space.size, "stages": stages,
                "incumbent": recorded.incumbent, "choices": [item.to_json() for item in choices], "ceilings": dict(recorded.ceilings),
                "ranking": [{"configuration": name, "score": score, "values": rows[name][WHOLE].values} for score, name in every],
                "rank_correlation": matching, "report": str(written) if written else None,
            }
        )  # fmt: skip
        return
    print_table("configurations by how far they came", ("stage", "count"), [[k, f"{v:,}"] for k, v in stages.items()], right=("count",))
    print()
    kind = "measured" if recorded.measured else "predicted"
    lines = []
    for number, (score, name) in enumerate(every[:_TOP], 1):
        note = " (base)" if name == recorded.incumbent else ""
        lines.append([str(number), f"{name}{note}", f"{score:.4f}", shown_values(recorded, rows[name][WHOLE].values)])
    heading = f"best of {len(every):,} configurations, {kind} ({recorded.objective.score} score, smaller is better)"
    print_table(
        heading, ("rank", "configuration", "score", "differs from the base"), lines, right=("rank", "score"), fold="differs from the base"
    )
    print()
    for item in choices:
        note = ", the base spec's own" if item.configuration == recorded.incumbent else ""
        print(f"chosen for {item.bucket}: {item.configuration}{note}, score {item.score:.4f}, {item.ties} within {item.noise:.1%}")
    if matching:
        print(f"predicted vs measured: mean rank correlation {sum(matching.values()) / len(matching):.2f} over {len(matching)} shapes")
    if written:
        print(f"report: {written}")


def _replay(directory: Path, strategy: str, seed: int, budget: str, name: str, on: str, arch: str, json: bool) -> None:
    from kdgen.errors import UsageError
    from kdgen.sweep.recorded import read_recorded
    from kdgen.sweep.replay import replay
    from kdgen.sweep.store import Store

    configurations, seconds = parse_budget(budget)
    if seconds is not None:
        raise UsageError(f"--budget {budget}: a replay takes no time; give a number of configurations")
    with Store(directory, read_only=True) as store:
        found = replay(read_recorded(store, name=name, device=on, target=arch), strategy, seed, configurations)
    if json:
        print_json(found.to_json())
        return
    print(f"{found.strategy}, seed {found.seed}: {found.evaluated} configurations evaluated on {found.shapes} shapes in all")
    print(f"chosen: {found.chosen}, score {found.score:.4f}, {found.behind:.2%} behind the best stored one ({found.best:.4f})")
    if found.unknown:
        print(f"{found.unknown} points that it asked for have no stored result")


class _Listener:
    """Tells of configurations as they are done: a line that changes on a terminal, plain lines elsewhere, nothing for JSON."""

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._counts: dict[str, int] = {}
        self._best: float | None = None
        self._progress: Any = None

    def __enter__(self) -> _Listener:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            from kdgen.cli.output import make_console

            self._progress = Progress(
                SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=make_console(stderr=True), transient=True
            )
            self._progress.add_task("compiling")
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing more follows."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def hear(self, outcome: Outcome) -> None:
        """One configuration is done."""
        stage = str(outcome.stage)
        self._counts[stage] = self._counts.get(stage, 0) + 1
        if outcome.score is not None and (self._best is None or outcome.score < self._best):
            self._best = outcome.score
        if self._progress is not None:
            best = f", best {self._best:.4f}" if self._best is not None else ""
            text = ", ".join(f"{count} {name}" for name, count in self._counts.items())
            self._progress.update(self._progress.task_ids[0], description=text + best)
        elif not self._quiet and not outcome.known:
            score = f" {outcome.score:.4f}" if outcome.score is not None else ""
            reason = f": {outcome.reason}" if outcome.reason else ""
            print(f"{outcome.configuration} {stage}{score}{reason}", file=sys.stderr, flush=True)


@app.command("apply")
def apply(
    directory: StoreArgument,
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The spec to write. Default: specs/tuned/TARGET/NAME.yaml.")
    ] = None,
    bucket: Annotated[str, typer.Option("--bucket", metavar="NAME", help="Choose for these shapes only.")] = "all",
    name: NameOption = "",
    arch: StoredArchOption = "",
    on: OnOption = "",
    json: JsonOption = False,
) -> None:
    """Write the chosen configuration as a spec on top of the swept one.

    Example: kdgen sweep apply sweeps/gemm -o specs/tuned/sm_120/gemm.yaml
    """
    from kdgen.sweep.apply import apply as write
    from kdgen.sweep.apply import default_path
    from kdgen.sweep.recorded import read_recorded
    from kdgen.sweep.store import Store

    with Store(directory, read_only=True) as store:
        recorded = read_recorded(store, name=name, device=on, target=arch)
    path = output or default_path(recorded, bucket)
    choice, spec = write(recorded, path, bucket)
    if json:
        print_json({"path": str(path), "choice": choice.to_json(), "digest": spec.digest})
        return
    print(f"{path}: configuration {choice.configuration}, score {choice.score:.4f}, {'measured' if choice.measured else 'predicted'}")


@app.command("report")
def report(directory: StoreArgument, *, name: NameOption = "", arch: StoredArchOption = "", on: OnOption = "") -> None:
    """Write report.html and its pictures anew from what is stored.

    Example: kdgen sweep report sweeps/gemm
    """
    from kdgen.sweep.recorded import read_recorded
    from kdgen.sweep.report import write_report
    from kdgen.sweep.store import Store

    with Store(directory, read_only=True) as store:
        recorded = read_recorded(store, name=name, device=on, target=arch)
    print(f"report: {write_report(recorded, directory)}")


@app.command("export")
def export(
    directory: StoreArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ends with .csv, .json or .parquet.", show_default=False)],
) -> None:
    """Write every stored row to a file.

    Example: kdgen sweep export sweeps/gemm gemm.csv
    """
    from kdgen.sweep.export import export as write
    from kdgen.sweep.store import Store

    with Store(directory, read_only=True) as store:
        print(f"{file}: {write(store, file):,} rows")
