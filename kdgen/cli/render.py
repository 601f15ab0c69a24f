"""`kdgen render` and `kdgen schema`: what kdgen makes out of a spec before it compiles, and what it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdgen.cli.build import SetOption, SpecPath, chosen_targets
from kdgen.cli.output import print_json


def render(
    spec: SpecPath,
    kernel: Annotated[str | None, typer.Argument(metavar="[KERNEL]", help="Only this kernel of the spec.", show_default=False)] = None,
    *,
    arch: Annotated[str | None, typer.Option("--arch", metavar="TARGET", help="For this target. Default: the spec's first.")] = None,
    marks: Annotated[bool, typer.Option("--marks", help="With the #line marks that lead compiler messages to the template.")] = False,
    overrides: SetOption = None,
) -> None:
    """Print the CUDA C++ text of a spec's kernels.

    Example: kdgen render specs/engines/kimi-k2.6.yaml tree_build --arch sm_120
    """
    from kdgen.errors import UsageError
    from kdgen.render import render_kernel
    from kdgen.spec import load_spec

    loaded = load_spec(str(spec), overrides or ())
    target = chosen_targets(loaded, [arch] if arch else None)[0]
    chosen = [loaded.kernel(kernel)] if kernel else loaded.kernels
    if not chosen:
        raise UsageError(f"{spec}: the spec has no kernels")
    for item in chosen:
        print(render_kernel(item, target, marks).text, end="")


def schema(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="kernel or engine.", show_default=False)] = None,
    *,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="DIR", help="Write kernel.json and engine.json into DIR instead.")
    ] = None,
) -> None:
    """Print the JSON Schema of a kind of spec, for editors that complete and check YAML.

    The first line of each shipped spec tells editors to look for it in generated/schema.

    Example: kdgen schema --write generated/schema
    """
    from kdgen.errors import UsageError
    from kdgen.spec import json_schema, write_schemas

    if write is not None and kind is None:
        for path in write_schemas(write):
            print(path)
    elif kind == "kernel":
        print_json(json_schema("kernel"))
    elif kind == "engine":
        print_json(json_schema("engine"))
    else:
        raise UsageError(f"'{kind or ''}' is no kind of spec; allowed: kernel or engine alone, or --write DIR alone")
