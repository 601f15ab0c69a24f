"""The command line. `main` runs a command and turns every way it can end into an exit code and a clean message."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DIFFERENT = 3
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kdgen ARGUMENTS` (default: those of the process) and leave with its exit code.

    Raises:
        SystemExit: always.
    """
    # Start-up makes many objects that live to the end; looking through them for garbage costs a tenth of a short command's time.
    gc.set_threshold(100_000)
    raise SystemExit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run `kdgen ARGUMENTS`; returns the exit code. Errors are printed to standard error (raised only with `--debug`)."""
    if arguments == ["--version"]:
        # Scripts ask for the version often: answer without loading the command tree.
        from kdgen import __version__

        print(f"kdgen {__version__}")
        return EXIT_OK
    debug = "--debug" in arguments
    try:
        from kdgen.cli.app import command

        code = command().main(arguments, prog_name="kdgen", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        # A closed pipe (`| head`) ends here: the parser has already made both streams harmless.
        code = stop.code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception as error:
        if debug and not _is_usage(error):
            raise
        return _report(error)
    if code == EXIT_INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else EXIT_OK


def _is_usage(error: Exception) -> bool:
    # The parser's own exceptions, told by their shape: typer has moved their classes between packages over its releases.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _report(error: Any) -> int:
    """Say on standard error what went wrong; returns the exit code."""
    from kdgen.errors import KdgenError

    if isinstance(error, KdgenError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if _is_usage(error):
        context = getattr(error, "ctx", None)
        if context is not None:
            print(f"{context.get_usage()}\nTry '{context.command_path} --help'.\n", file=sys.stderr)
        print(f"error: {error.format_message()}", file=sys.stderr)
        return EXIT_USAGE
    if type(error).__name__ == "Abort":
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and not (error.name or "kdgen").startswith("kdgen"):
        print(
            f"error: the Python package '{error.name}' is missing; the commands need the compiler extra: pip install 'kdgen[compiler]'",
            file=sys.stderr,
        )
        return EXIT_FAILED
    print(
        f"internal error: {type(error).__name__}: {error}\n"
        "This is a fault in kdgen. Please report it with the spec, the command, what `kdgen --debug COMMAND ...` prints\n"
        "(the same command with --debug in front), and the output of `kdgen doctor --json`.",
        file=sys.stderr,
    )
    return EXIT_FAILED
