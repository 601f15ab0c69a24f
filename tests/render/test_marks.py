"""Line marks: every line of the text is attributed to the template line it came from, and the marks change nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdgen.errors import RenderError
from kdgen.render.template import render_template

_LINE = re.compile(r'#line (\d+) "(.*)"\Z')


def attributed(text: str) -> list[tuple[str, str]]:
    """Every line of a marked text with the `file:line` a compiler gives it."""
    file, number, out = "?", 0, []
    for line in text.split("\n"):
        mark = _LINE.match(line)
        if mark:
            number, file = int(mark[1]), mark[2]
        else:
            out.append((line, f"{file}:{number}"))
            number += 1
    return out


def places(tmp_path: Path, **files: str) -> dict[str, set[str]]:
    """Renders `main` and gives the places of every word that starts with `at`; also checks that marks change nothing."""
    for name, text in files.items():
        (tmp_path / f"{name}.j2").write_text(text)
    clean, marked = render_template(tmp_path, "main.j2", {"n": 3, "yes": True}, marks=True)
    lines = attributed(marked)
    assert "\n".join(line for line, _ in lines) == clean
    found: dict[str, set[str]] = {}
    for line, place in lines:
        word = re.match(r"\W*(at\w+)", line)
        if word:
            found.setdefault(word[1], set()).add(place)
    return found


def test_every_construct(tmp_path):
    main = """\
at1
{% include "head.j2" %}
{% import "m.j2" as m %}
at4
{% for i in range(n) %}
  at6 {{ i }}
  {% if i == 1 %}
  at8
  {% endif %}

  at11
{% endfor %}
{# a remark #}
at14
{# a remark
   over lines #}
at17
{{ m.store("at_macro") }}
at19
{% set x = [
  1,
  2] %}
at23
x {{ "a
b" }}
at26
at27 {% if yes %} y {% endif %}

at29
{%- if yes %}

at32
{%- endif %}

at35 {{- "x" }}
#define MACRO \\
  {% if yes %}
  at_continued \\
  {% endif %}
  end
at41
{% raw %}
at43 {{ not }}
{% endraw %}
at45
"""
    head = "{% if yes %}\nat_head2\n{% endif %}\nat_head4\n"
    macro = "{% macro store(x) %}\n{{ x }}\nat_m3\n{% endmacro %}\n"
    found = places(tmp_path, main=main, head=head, m=macro)
    for word, where in found.items():
        digits = re.search(r"\d+", word)
        if word.startswith("at_head"):
            assert where == {f"templates/head.j2:{digits[0]}"}, word
        elif word == "at_m3":
            assert where == {"templates/m.j2:3"}
        elif word == "at_macro":
            assert where == {"templates/m.j2:2"}
        elif word != "at_continued":
            assert where == {f"templates/main.j2:{digits[0]}"}, word
    assert {f"at{i}" for i in (1, 4, 6, 8, 11, 14, 17, 19, 23, 26, 27, 41, 43, 45)} <= set(found)


def test_no_mark_inside_a_continued_macro(tmp_path):
    (tmp_path / "main.j2").write_text("#define M \\\n{% for i in range(n) %}\n  a{{ i }} \\\n{% endfor %}\n  b\nafter\n")
    _, marked = render_template(tmp_path, "main.j2", {"n": 2}, marks=True)
    text = marked.split("\n")
    assert text[:5] == ['#line 1 "templates/main.j2"', "#define M \\", "  a0 \\", "  a1 \\", "  b"]
    assert text[5:7] == ['#line 6 "templates/main.j2"', "after"]


def test_all_lines_of_a_value_have_its_place(tmp_path):
    (tmp_path / "main.j2").write_text("a\n{{ text }} {\nb\n")
    _, marked = render_template(tmp_path, "main.j2", {"text": "one\ntwo\nthree"}, marks=True)
    assert dict(attributed(marked))["three {"] == "templates/main.j2:2"
    assert dict(attributed(marked))["b"] == "templates/main.j2:3"


def test_text_that_marks_would_change_is_refused(tmp_path):
    (tmp_path / "main.j2").write_text("{% set x %}abc{% endset %}\n{{ 'same' if x == 'abc' else 'other' }}\n")
    assert render_template(tmp_path, "main.j2", {}, marks=False)[0] == "same\n"
    with pytest.raises(RenderError, match="do not filter or compare captured text"):
        render_template(tmp_path, "main.j2", {}, marks=True)


PIECES = st.sampled_from(
    [
        "{LINE} text", "{LINE}", "", "  ", "// remark \\", "{# remark #}", "{#- remark -#}", "{LINE} {# remark #}", "{LINE} {{ n }}",
        "{LINE} {{ n -}}", "{{ 'x' }} y", "{% if yes %}", "{% if not yes %}", "{%- if yes %}", "{% if yes -%}", "  {% for i in range(2) %}",
        "{LINE} {% if yes %} z {% endif %}", "{% set a = [1,\n2] %}", '{% include "part.j2" %}', '{LINE} {% include "part.j2" %}',
        "{{ m.f(n) }}",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path, pieces):
    lines: list[str] = ['{% import "m.j2" as m %}']
    open_blocks: list[str] = []
    for piece in pieces:
        if "endif" not in piece and (found := re.search(r"{%-? (if|for)", piece)):
            open_blocks.append(found[1])
        lines += piece.split("\n")
        if len(open_blocks) > 2:
            lines.append(f"{{% end{open_blocks.pop()} %}}")
    lines += [f"{{% end{block} %}}" for block in reversed(open_blocks)]
    lines = [line.replace("{LINE}", f"at{number}") for number, line in enumerate(lines, 1)]
    part = "part {{ n }}\n{% if yes %}\nat_part3\n{% endif %}\n"
    macro = "{% macro f(x) %}\nfirst {{ x }}\nat_m3\n{% endmacro %}\n"
    continued = False
    (tmp_path / "main.j2").write_text("\n".join(lines) + "\n")
    (tmp_path / "part.j2").write_text(part)
    (tmp_path / "m.j2").write_text(macro)
    clean, marked = render_template(tmp_path, "main.j2", {"n": 3, "yes": True}, marks=True)
    out = attributed(marked)
    assert "\n".join(line for line, _ in out) == clean
    for line, place in out:
        word = re.match(r"\s*at(_part|_m|)(\d+)", line)
        if word and not continued:
            name = {"": "main", "_part": "part", "_m": "m"}[word[1]]
            assert place == f"templates/{name}.j2:{word[2]}"
        continued = line.endswith("\\") or (continued and not line.strip())


PLANTED = """\
namespace {
{% if p.chain %}
constexpr int a = {{ rows }};
{% endif %}
}
{{ kernel("toy") }} {
{% for i in range(2) %}
  y[{{ i }}] = {{ p.scale | f32 }};
{% endfor %}
  planted_error;
  {% if p.chain %}
  {% include "part.j2" %}
  {% endif %}
  y[1] = last_error;
}
"""


def expected_errors() -> dict[str, tuple[str, int]]:
    return {
        "planted_error": ("templates/toy.cu.j2", 10),
        "part_error": ("templates/part.j2", 2),
        "last_error": ("templates/toy.cu.j2", 14),
    }


def test_host_compiler_points_at_the_template(workshop, tmp_path):
    workshop.write("part.j2", "  // one\n  y[0] = part_error;\n")
    source = workshop.render(PLANTED, marks=True)
    (tmp_path / "toy.cpp").write_text(source.text)
    try:
        command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{workshop.root / 'templates'}", "toy.cpp"]
        log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    except FileNotFoundError:
        pytest.skip("no g++")
    for word, (file, line) in expected_errors().items():
        assert re.search(rf"^{re.escape(file)}:{line}:\d+: error: .*{word}", log, re.MULTILINE), log
    assert log.count("error:") == 3


def test_host_text_compiles(workshop, tmp_path):
    workshop.write("part.j2", "  // one\n")
    text = PLANTED.replace("planted_error;", "(void)x, (void)scratch, (void)count, (void)rows_of_x, (void)a;").replace("last_error", "2.f")
    for marks in (False, True):
        (tmp_path / "toy.cpp").write_text(workshop.render(text, marks=marks).text)
        try:
            command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-fsyntax-only", f"-I{workshop.root / 'templates'}", "toy.cpp"]
            result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no g++")
        assert result.returncode == 0, result.stderr


def test_nvrtc_points_at_the_template(workshop):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    from kdgen.render import device_files
    from kdgen.targets import TARGETS

    workshop.write("part.j2", "  // one\n  y[0] = part_error;\n")
    source = workshop.render(PLANTED, "sm_120", marks=True)
    headers = device_files(TARGETS["sm_120"])
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    try:
        error, program = nvrtc.nvrtcCreateProgram(source.text.encode(), b"toy.cu", len(names), texts, names)
    except (RuntimeError, OSError) as failure:
        pytest.skip(f"no NVRTC: {failure}")
    assert int(error) == 0
    options = [b"--gpu-architecture=sm_120f", b"--std=c++20"]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    for word, (file, line) in expected_errors().items():
        assert re.search(rf'^{re.escape(file)}\({line}\): error: .*"{word}"', log.decode(), re.MULTILINE), log.decode()
