"""The command tree: options common to all commands, and every command in the order `kdgen --help` lists them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kdgen.cli.bench import bench
from kdgen.cli.build import build
from kdgen.cli.clean import clean
from kdgen.cli.decode import bundle, decode
from kdgen.cli.diff import diff
from kdgen.cli.doctor import doctor
from kdgen.cli.inspect import inspect
from kdgen.cli.render import render, schema
from kdgen.cli.sweep import app as sweep
from kdgen.cli.verify import tree, verify
from kdgen.kdtr.cli import app as kdtr

app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _show_version(wanted: bool) -> None:
    if wanted:
        from kdgen import __version__

        print(f"kdgen {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")] = False,
) -> None:
    """Turn YAML kernel specs into CUDA cubins, inspect them, and prove them right on the CPU or a GPU.

    **Exit codes**

    - 0: all went well
    - 1: something failed: compiling, a missing tool, a device
    - 2: the input is wrong: a spec, an option
    - 3: a verification found a difference
    - 130: interrupted

    **Environment**

    - KDGEN_CACHE_DIR: where compiled objects are kept (default ~/.cache/kdgen)
    - KDGEN_CXX: the C++ compiler of the host target (default g++, else clang++)

    Example: kdgen build specs/engines/kimi-k2.6.yaml --arch sm_120
    """


for function in (build, render, inspect, verify, bench, bundle, decode, tree, diff, schema, doctor, clean):
    app.command()(function)
app.add_typer(sweep, name="sweep")
app.add_typer(kdtr, name="kdtr", help="Look into KDTR tensor files.")


def command() -> Any:
    """The parser of the whole command line."""
    return typer.main.get_command(app)
