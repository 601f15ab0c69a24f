"""How commands end: exit codes and messages, whatever happens inside."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdgen import __version__, cli
from kdgen.cli import app as app_module
from kdgen.errors import CompileError, SpecError
from kdgen.spec import load_spec
from tests.cli.conftest import TINY

COMMANDS = ("build", "render", "inspect", "verify", "tree", "diff", "bench", "bundle", "decode", "schema", "doctor", "clean", "kdtr")


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    class Parser:
        def main(self, *args: object, **options: object) -> None:
            raise error

    monkeypatch.setattr(app_module, "command", Parser)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"kdgen {__version__}\n"


def test_version_loads_nothing_heavy() -> None:
    code = "import sys; from kdgen.cli import run; run(['--version']); print(sorted({'typer', 'rich', 'numpy', 'yaml'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_help_says_the_exit_codes_and_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("Exit codes", "3: a verification found a difference", "130: interrupted", "KDGEN_CACHE_DIR", *COMMANDS):
        assert text in out


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "kdtr"])
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    assert f"Example: kdgen {command} " in capsys.readouterr().out.replace("\n", " ") + " "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bild"], "No such command 'bild'"),
        (["build"], "Missing argument 'SPEC'"),
        (["build", "x.yaml", "--job", "2"], "No such option"),
        (["build", "x.yaml", "-j", "0"], "Invalid value for '-j' / '--jobs'"),
        (["build", "x.yaml", "--keep", "elf"], "'elf' is not known; allowed: ptx, sass"),
        (["build", "/nowhere/x.yaml"], "/nowhere/x.yaml: no such file"),
        (["schema", "model"], "'model' is no kind of spec; allowed: kernel or engine"),
        (["verify", "x.yaml", "--device", "cuda", "--sanitize"], "--sanitize is for --device host"),
    ],
)
def test_wrong_use_is_2_with_a_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_own_errors_have_their_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, CompileError("templates/x.cu.j2:3: error: no"))
    assert cli.run(["build"]) == 1
    assert capsys.readouterr().err == "error: templates/x.cu.j2:3: error: no\n"
    raising(monkeypatch, SpecError([]))
    assert cli.run(["build"]) == 2


def test_unexpected_errors_ask_for_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, ZeroDivisionError("oh"))
    assert cli.run(["build"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("internal error: ZeroDivisionError: oh\n")
    assert "kdgen --debug" in err
    assert "Traceback" not in err
    with pytest.raises(ZeroDivisionError):
        cli.run(["--debug", "build"])


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, ModuleNotFoundError("No module named 'jinja2'", name="jinja2"))
    assert cli.run(["build"]) == 1
    assert "'jinja2' is missing" in capsys.readouterr().err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert cli.run(["build"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_closed_pipe_is_quiet() -> None:
    shell = f"'{sys.executable}' -m kdgen.cli schema engine | head -c 10"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout == '{\n  "$defs'
    assert done.stderr == ""


def test_main_leaves_with_the_code() -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0


def test_interrupted_build_leaves_nothing_half_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdgen.cli", "build", TINY, "--arch", "sm_120", "--out", str(tmp_path / "out"), "-j", "1"]
    environment = {**os.environ, "KDGEN_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"[1/{len(load_spec(TINY).kernels)}] sm_120")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache" / "tmp").iterdir())
