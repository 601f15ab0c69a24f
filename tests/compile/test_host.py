"""The host compiler: finding it, its messages, reproducible libraries that export only what they should."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from kdgen.compile import HostCompiler, compile_host, compile_host_runtime, compiler_id, find_host_compiler, host_options
from kdgen.compile import host_compiler as host_compiler_module
from kdgen.errors import CompileError, ToolchainError, UsageError
from kdgen.targets import get_target

HOST = get_target("host")
HEADERS = {
    "device/host.hpp": "#pragma once\nint added(int value);\ninline int& counter() { static int count; return count; }\n",
    "device/host_runtime.cpp": """#include "host.hpp"
int added(int value) { return value + ++counter(); }
extern "C" int kdgen_runtime() { return 7; }
""",
}
SOURCE = """#include "device/host.hpp"
#line 20 "templates/x.cu.j2"
extern "C" int kdgen_launch_x(int value) {
  return added(value);
}
"""


@pytest.fixture(scope="module")
def runtime() -> bytes:
    return compile_host_runtime(HEADERS, HOST)


def test_library_runs_and_exports_only_entries(tmp_path: Path, runtime: bytes) -> None:
    binary = compile_host(SOURCE, "x.cpp", HEADERS, HOST, runtime)
    assert binary.log == ""
    path = tmp_path / "x.so"
    path.write_bytes(binary.library)
    library = ctypes.CDLL(str(path))
    assert library.kdgen_launch_x(41) == 42
    assert library.kdgen_runtime() == 7
    assert not hasattr(library, "_Z5addedi")
    exported = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.split("\n")
    assert {line.split()[-1] for line in exported if line} == {"kdgen_launch_x", "kdgen_runtime"}


def test_runtime_is_compiled_along_when_not_given(runtime: bytes) -> None:
    assert compile_host(SOURCE, "x.cpp", HEADERS, HOST).library == compile_host(SOURCE, "x.cpp", HEADERS, HOST, runtime).library


@pytest.mark.parametrize("name", ["host", "host_asan"])
def test_equal_inputs_give_equal_bytes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = get_target(name)
    first = compile_host(SOURCE, "x.cpp", HEADERS, target).library
    # Other temporary directories, another working directory, and variables that compilers obey.
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "host.hpp").write_text("#error not this one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    second = compile_host(SOURCE, "x.cpp", HEADERS, target).library
    assert first == second
    assert str(tmp_path).encode() not in second


def test_errors_name_template_lines(runtime: bytes) -> None:
    with pytest.raises(CompileError, match=r"x.cpp, target host: .* refused the code\n[\s\S]*templates/x.cu.j2:21:\d+: error: "):
        compile_host(SOURCE.replace("added(value)", "subtracted(value)"), "x.cpp", HEADERS, HOST, runtime)
    broken = {**HEADERS, "device/host.hpp": HEADERS["device/host.hpp"].replace("int added", "itn added")}
    with pytest.raises(CompileError, match=r"templates/device/host.hpp:2:\d+: error"):
        compile_host(SOURCE, "x.cpp", broken, HOST, runtime)


def test_warnings_are_kept(runtime: bytes) -> None:
    log = compile_host(SOURCE.replace("return", "int unused; return"), "x.cpp", HEADERS, HOST, runtime).log
    assert "templates/x.cu.j2:21" in log
    assert "unused" in log


def test_multiply_and_add_is_not_fused(tmp_path: Path, runtime: bytes) -> None:
    source = 'extern "C" double kdgen_launch_x(double a, double b, double c) { return a * b + c; }\n'
    path = tmp_path / "x.so"
    path.write_bytes(compile_host(source, "x.cpp", HEADERS, HOST, runtime).library)
    function = ctypes.CDLL(str(path)).kdgen_launch_x
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    value = 1.0 + 2.0**-30
    assert function(value, value, -(1.0 + 2.0**-29)) == 0.0  # fused, 2⁻⁶⁰ would be left


def test_sanitizers_only_where_asked() -> None:
    compiler = find_host_compiler()
    assert any("sanitize=address" in option for option in host_options(get_target("host_asan"), compiler))
    assert not any("sanitize" in option for option in host_options(HOST, compiler))
    with pytest.raises(UsageError, match="is a GPU"):
        host_options(get_target("sm_120"), compiler)


def test_isa_reaches_options_and_identity() -> None:
    old = HostCompiler("/g++", "g++", "12.2.0", "0", "x86-64")
    assert not any(option.startswith("-march") for option in host_options(HOST, old))
    assert "-march=x86-64-v3" in host_options(HOST, HostCompiler("/g++", "g++", "12.2.0", "0", "x86-64-v3"))
    assert compiler_id(HOST).endswith(f", {find_host_compiler().isa}")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KDGEN_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"neither g\+\+ nor clang\+\+ is on PATH: apt-get install g\+\+"):
        find_host_compiler()


def fake_compiler(place: Path, says: str) -> Path:
    place.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    place.chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("gcc version 9.4.0 (Ubuntu)", r"g\+\+ 9.4.0; the host target needs g\+\+ 11 or newer"),
        ("clang version 12.0.1", r"clang\+\+ 12.0.1; the host target needs clang\+\+ 13 or newer"),
        ("icc version 19", r"neither g\+\+ nor clang\+\+"),
    ],
)
def test_compilers_that_will_not_do(says: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KDGEN_CXX", str(fake_compiler(tmp_path / "cxx", says)))
    with pytest.raises(ToolchainError, match=message):
        find_host_compiler()


def test_chosen_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KDGEN_CXX", str(fake_compiler(tmp_path / "mine", "Debian clang version 16.0.6 (27)")))
    found = find_host_compiler()
    assert (found.name, found.version) == ("clang++", "16.0.6")
    monkeypatch.setenv("KDGEN_CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="KDGEN_CXX is 'no-such-compiler'"):
        find_host_compiler()


def test_identity_does_not_depend_on_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds = []
    for name in ("one", "two"):
        says = f"COLLECT_GCC=/{name}/g++\nConfigured with: this\ngcc version 13.2.0 (x)"
        monkeypatch.setenv("KDGEN_CXX", str(fake_compiler(tmp_path / name, says)))
        builds.append(find_host_compiler().build)
    assert builds[0] == builds[1]
    monkeypatch.setenv("KDGEN_CXX", str(fake_compiler(tmp_path / "three", "Configured with: that\ngcc version 13.2.0 (x)")))
    assert find_host_compiler().build != builds[0]


def test_isa_of_an_older_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_compiler_module.platform, "machine", lambda: "x86_64")
    real = Path.read_text
    flags = "flags\t\t: fpu cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma movbe"
    for text, want in ((flags, "x86-64"), (f"{flags} abm\n", "x86-64-v3"), ("", "x86-64")):
        monkeypatch.setattr(Path, "read_text", lambda self, *a, text=text: text if str(self) == "/proc/cpuinfo" else real(self, *a))
        host_compiler_module.host_isa.cache_clear()
        assert host_compiler_module.host_isa() == want
    monkeypatch.setattr(host_compiler_module.platform, "machine", lambda: "aarch64")
    host_compiler_module.host_isa.cache_clear()
    assert host_compiler_module.host_isa() == "aarch64"
    host_compiler_module.host_isa.cache_clear()
