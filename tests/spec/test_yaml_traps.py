"""What YAML would read otherwise than it looks, and files that are no specs, each with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdgen.errors import SpecError
from kdgen.spec import load_spec
from kdgen.spec.yaml_marks import MAX_BYTES, read_document, read_value


def with_stages(kernel_text: str, value: str) -> str:
    return kernel_text + f"  stages: {value}\n"


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("on", "write true"), ("Off", "write false"), ("yes", "write true"), ("NO", "write false"),
        ("y", "write true"), ("n", "write false"),
        ("1e5", "write 1.0e+5 or 100000"), ("1.5e3", "write 1.5e+3 or 1500"), ("1e-5", "write 1.0e-5"), ("-2E2", "write -2.0e+2 or -200"),
        ("0x10", "write 16"), ("0b101", "write 5"), ("010", "write 8 or 10"), ("0o10", "write 8"), ("09", "write 9"),
        ("1:30", "base-60"), ("1_000", "write 1000"), ("1_0.5", "write 10.5"), (".inf", "finite"), ("-.INF", "finite"), (".nan", "finite"),
        ("2024-01-02", "a date"), ("99999999999999999999", "64 bits"), ("9223372036854775808", "64 bits"), ("1.0e+999", "finite"),
        ("=", "quote it"),
        ("!!int 3", "tag"), ("!!python/name:os.system 3", "tag"), ("! 3", "tag"),
    ],
)  # fmt: skip
def test_trap_is_refused_at_its_line(loader, kernel_text, value, remedy):
    fault = loader.fault(with_stages(kernel_text, value))
    assert fault.line == 9
    assert remedy in fault.message


@pytest.mark.parametrize("value", ['"on"', "'1e5'", '"0x10"', "|\n    yes"])
def test_quoted_text_is_text(loader, kernel_text, value):
    # It is not a number either, which is what the one fault says.
    fault = loader.fault(with_stages(kernel_text, value))
    assert "allowed an integer 1…8" in fault.message


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        ("3", 3), ("true", True), ("TRUE", True), ("1.0e-5", 1e-5), ("-0", 0), ("+7", 7), ("1.5", 1.5),
        ("x-1", "x-1"), ("null", None), ("0", 0), ("0.5", 0.5),
    ],
)  # fmt: skip
def test_plain_values_are_read(value, meaning):
    result, problems = read_value(value)
    assert (result, type(result), problems) == (meaning, type(meaning), [])


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (b"", 0, "empty"),
        (b"# only a comment\n", 0, "empty"),
        (b"---\n", 0, "empty"),
        (b"- a\n- b\n", 1, "mapping"),
        (b"just text\n", 1, "mapping"),
        (b"\xef\xbb\xbfkind: other\n", 1, "byte-order mark"),
        (b"\xff\xfek\0i\0", 1, "UTF-16"),
        (b"kind: kernel\nname: \0\n", 2, "NUL"),
        (b"kind: kernel\nname: \xe9\n", 2, "not UTF-8"),
        (b"kind: kernel\nname: \x07\n", 2, "U+0007"),
        (b"kind: kernel\n\tname: a\n", 2, "tab"),
        (b"kind: kernel\nname: [a\n", 3, "not YAML"),
        (b"kind: kernel\nname: a: b\n", 2, "not YAML"),
        (b"kind: kernel\nname: {a: ${b}}\n", 2, "must be quoted"),
        (b"a: 1\nb: *nowhere\n", 2, "alias"),
        (b"a: &x\n  b: *x\n", 2, "contain itself"),
        (b"a: &x [1, *x]\n", 1, "contain itself"),
        (b"a: 1\n---\nb: 2\n", 2, "second document"),
        (b"a: 1\n1: 2\n", 2, "must be text"),
        (b"a: 1\nnull: 2\n", 2, "must be text"),
        (b"a: 1\non: 2\n", 2, "'on'"),
        (b"a: 1\n? [x]\n: 2\n", 2, "must be text"),
        (b"a: 1\nb: 2\na: 3\n", 3, "given twice; first in line 1"),
        (b"a: 1\n'a': 3\n", 2, "given twice; first in line 1"),
        (b"x: &x {a: 1}\ny:\n  <<: *x\n  a: 2\n", 4, "given twice"),
        (b"x: &x {a: 1}\nz: &z {a: 2}\ny:\n  <<: [*x, *z]\n", 2, "given twice"),
        (b"x: &x {a: 1}\ny:\n  <<: *x\n  <<: *x\n", 4, "given twice"),
        (b"x: &x 3\ny:\n  <<: *x\n", 3, "only mappings"),
        (b"y: &y\n  <<: *y\n", 2, "around it"),
        (b"[" * 40, 1, "deep"),
        (b"[" * 30_000, 1, "deep"),
        (b"a: [" + b"1, " * 25_000 + b"]\n", 1, "20000 values"),
    ],
)
def test_broken_file(tmp_path: Path, text, line, part):
    path = tmp_path / "spec.yaml"
    path.write_bytes(text)
    faults = read_document(str(path)).faults
    assert [(fault.line, part in fault.message) for fault in faults] == [(line, True)], [str(fault) for fault in faults]


def test_merge_without_collision_is_allowed(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("x: &x {a: 1}\ny:\n  <<: *x\n  b: 2\n")
    document = read_document(str(path))
    assert document.faults == []
    assert document.data["y"] == {"a": 1, "b": 2}


def test_alias_bomb_is_stopped(tmp_path: Path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    merges = ["b0: &b0 {}"] + [f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    for text in ("\n".join(lines), "\n".join(merges)):
        path = tmp_path / "spec.yaml"
        path.write_text(text)
        faults = read_document(str(path)).faults
        assert len(faults) == 1
        assert "expanded" in faults[0].message or "beyond bounds" in faults[0].message


def test_all_tabs_are_reported(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("a:\n\tb: 1\n\tc: 2\nd: 3\n  \te: 4\n")
    assert [fault.line for fault in read_document(str(path)).faults] == [2, 3, 5]


def test_files_that_are_no_files(tmp_path: Path):
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, part in (
        (tmp_path, "directory"),
        (tmp_path / "none.yaml", "no such file"),
        (huge, str(MAX_BYTES)),
        ("/dev/zero", "regular"),
        ("a\0b", ""),
    ):
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert len(caught.value.faults) == 1
        assert part in str(caught.value)


def test_unreadable_text_never_escapes_as_another_error(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    alphabet = st.sampled_from([*"ab:-[]{}&*!|>'\"%@`#?,<= \n\t0x1_.e+~$", "kind: kernel\n", "<<: ", "*a", "&a ", "---\n", "${a}"])

    @given(st.lists(alphabet, max_size=40).map("".join))
    @settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        path.write_text(text)
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert caught.value.faults

    check()
