"""`kdgen build`: specs to cubins and host libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kdgen.cli.built import NUMBERS, resource_cells
from kdgen.cli.output import make_progress, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kdgen.build import BuildReport
    from kdgen.spec import Spec
    from kdgen.targets import Target

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="A kernel spec or an engine spec (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec, such as tree.budget=32. Repeatable.")
]
ArchOption = Annotated[
    list[str] | None, typer.Option("--arch", metavar="TARGET", help="Build for this target; repeatable. Default: the spec's targets.")
]
KEEP = ("ptx", "sass")


def build(
    spec: SpecPath,
    *,
    arch: ArchOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where DIR/SPEC/TARGET/ is written.")] = Path("generated"),
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Compile this many kernels at once. Default: every core.")] = None,
    overrides: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Compile everything anew, whatever the cache holds.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be compiled; write nothing.")] = False,
    keep: Annotated[str, typer.Option("--keep", metavar="KINDS", help="Also write these, separated by commas: ptx, sass.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile the kernels of a spec, and print what each needs.

    Needs no GPU and no CUDA toolkit. Kernels whose inputs have not changed are reused. A kernel that spills registers, or needs more
    shared memory than its target has, is an error unless its spec allows it.

    Example: kdgen build specs/engines/kimi-k2.6.yaml --arch sm_120 --arch host --set tree.budget=32
    """
    from kdgen.build import build_spec
    from kdgen.spec import load_spec

    kinds = parse_keep(keep)
    loaded = load_spec(str(spec), overrides or ())
    targets = chosen_targets(loaded, arch)
    progress = None if json or dry_run else make_progress()
    report = build_spec(loaded, targets, out, jobs=jobs, force=force, dry_run=dry_run, keep=kinds, progress=progress)
    if json:
        print_json(report.to_json())
    else:
        print_report(report)


def parse_keep(text: str) -> tuple[str, ...]:
    """`ptx,sass` as a tuple; UsageError for anything else in it."""
    from kdgen.errors import UsageError

    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    for kind in kinds:
        if kind not in KEEP:
            raise UsageError(f"--keep {text}: '{kind}' is not known; allowed: {', '.join(KEEP)}, or both separated by a comma")
    return kinds


def chosen_targets(spec: Spec, names: Sequence[str] | None) -> tuple[Target, ...]:
    """The targets called `names`, in that order without repetition; those of the spec when there are none."""
    from kdgen.targets import get_target

    return tuple(get_target(name) for name in dict.fromkeys(names or spec.targets))


def print_report(report: BuildReport) -> None:
    """Print what a build did: a table per target, then warnings and a summary."""
    for target in report.targets:
        columns = ("kernel", *NUMBERS, "state", "hash")
        rows = [
            [
                kernel.name,
                *resource_cells(kernel.resources),
                f"{kernel.status} {kernel.seconds:.1f} s" if kernel.status == "built" else kernel.status,
                kernel.hash[:8],
            ]
            for kernel in target.kernels
        ]
        if target is not report.targets[0]:
            print()
        fate = "would be written" if report.dry_run else "written" if target.changed else "up to date"
        print_table(f"{report.spec} for {target.target}: {target.directory} ({fate})", columns, rows, right=NUMBERS)
        for kernel in target.kernels:
            for text in filter(None, (kernel.note, kernel.warnings)):
                print(f"{kernel.name}: {text}", file=sys.stderr)
    print()
    kernels = [kernel for target in report.targets for kernel in target.kernels]
    waiting = sum(kernel.status == "to build" for kernel in kernels)
    done = f"{waiting} to build" if report.dry_run else f"{report.built} built"
    print(f"{done}, {len(kernels) - waiting - report.built} reused, {report.seconds:.2f} s")
