"""`kdgen verify` and `kdgen tree`: run a spec's kernels and say whether they are right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdgen.cli import EXIT_DIFFERENT
from kdgen.cli.build import SetOption, SpecPath
from kdgen.cli.output import make_console, print_json

if TYPE_CHECKING:
    from kdgen.verify import CaseVerdict, Verdict

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where kdgen build has put its output; used when it is current.")]


def verify(
    context: typer.Context,
    spec: SpecPath,
    *,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="host, cuda, or cuda:N.")] = "host",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the test inputs and of the random schedules.")] = 0,
    schedules: Annotated[
        int, typer.Option("--schedules", min=1, max=1000, help="Runs of each case. On the host, each with its own thread order.")
    ] = 4,
    regroup: Annotated[
        int, typer.Option("--regroup", min=0, max=1000, help="Other groupings of each case's rows: shuffled, alone, in part.")
    ] = 2,
    cases: Annotated[
        Path | None, typer.Option("--cases", metavar="FILE", help="Also run these worked DDTree cases (ddtree-oracle-v1).")
    ] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="On the host, with AddressSanitizer and UBSan. Slow.")] = False,
    only: Annotated[str, typer.Option("--only", metavar="REGEX", help="Only the kernels whose names match.")] = "",
    overrides: SetOption = None,
    out: OutOption = Path("generated"),
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Run every kernel of a spec against its numpy reference; one line each.

    Outputs and workspaces hold NaN patterns before each launch. On the host, every case runs with several thread orders and copy
    timings, which must not change a single bit; nor may a row's bits depend on the rows that are computed beside it. Leaves with 3
    when something differs.

    Example: kdgen verify specs/engines/kimi-k2.6.yaml --device host --seed 7
    """
    from kdgen.errors import UsageError
    from kdgen.spec import load_spec
    from kdgen.verify.sanitize import is_sanitized, note, rerun

    if sanitize and device != "host":
        raise UsageError(f"--sanitize is for --device host, not {device}; on a GPU run: compute-sanitizer kdgen verify …")
    loaded = load_spec(str(spec), overrides or ())
    if sanitize and not is_sanitized():
        raise typer.Exit(rerun(context.obj))
    if not loaded.kernels:
        raise UsageError(f"{spec}: the spec has no kernels to verify")

    from kdgen.verify.run import verify_cases, verify_spec

    settings: dict[str, Any] = {"seed": seed, "schedules": schedules, "sanitize": sanitize, "out": out}
    if is_sanitized():
        settings["watch"] = note
    verdicts: list[Verdict] = []
    width = max(len(kernel.name) for kernel in loaded.kernels)
    for verdict in verify_spec(loaded, device, regroup=regroup, only=only, **settings):
        verdicts.append(verdict)
        if not json:
            _print_line(verdict.passed, kernel_line(verdict, width), verdict.failures)
    case_verdicts: list[CaseVerdict] = []
    if cases is not None:
        for case in verify_cases(loaded, cases, device, **settings):
            case_verdicts.append(case)
            if not json:
                _print_line(case.passed, case_line(case), case.failures)
    everything: list[Verdict | CaseVerdict] = [*verdicts, *case_verdicts]
    failed = sum(not verdict.passed for verdict in everything)
    if json:
        kernels, worked = [v.to_json() for v in verdicts], [v.to_json() for v in case_verdicts]
        print_json({"spec": loaded.name, "device": device, "seed": seed, "kernels": kernels, "cases": worked, "passed": not failed})
    else:
        print(f"{len(everything) - failed} of {len(everything)} passed on {device}, seed {seed}")
    if failed:
        raise typer.Exit(EXIT_DIFFERENT)


def kernel_line(verdict: Verdict, width: int) -> str:
    """One kernel's verdict, without pass or FAIL."""
    accuracy = f"error {_figure(verdict.error)}, bound {_figure(verdict.bound)}" if verdict.bound else "bit for bit"
    rows = f" + {verdict.regroupings} regroupings" if verdict.regroupings else ""
    return f"{verdict.kernel:<{width}}  {verdict.cases} cases × {verdict.schedules} schedules{rows}, {accuracy}"


def case_line(verdict: CaseVerdict) -> str:
    """One worked case's verdict, without pass or FAIL."""
    kernels = f"variant kernels: {verdict.changes}" if verdict.changes else "the spec's kernels"
    return f"case {verdict.case}  {verdict.nodes} nodes × {verdict.schedules} schedules, scores within {_figure(verdict.error)}, {kernels}"


def _figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "infinite"


def _print_line(passed: bool, line: str, failures: tuple[str, ...]) -> None:
    from rich.text import Text

    console = make_console()
    console.print(Text.assemble(("pass" if passed else "FAIL", "bold green" if passed else "bold red"), f"  {line}"))
    if failures:
        more = f" (and {len(failures) - 1} more cases)" if len(failures) > 1 else ""
        console.print(Text(f"      {failures[0]}{more}"))


def tree(spec: SpecPath, *, overrides: SetOption = None, out: OutOption = Path("generated")) -> None:
    """Draw one decoded draft tree: a worked example through a spec's tree kernels, on the CPU.

    Example: kdgen tree specs/engines/kimi-k2.6.yaml
    """
    import sys

    from kdgen.spec import load_spec
    from kdgen.verify.show_tree import ASCII, UNICODE, draw, run_example

    result = run_example(load_spec(str(spec), overrides or ()), out)
    console = make_console()
    if result.changes:
        console.print(f"(the example needs other kernels than the spec's: {result.changes})")
    for line in draw(result, UNICODE if sys.stdout.isatty() else ASCII):
        console.print(line)
