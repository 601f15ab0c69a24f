"""The assembler's report and errors."""

from kdgen.compile.ptxas import PtxLines, Resources, has_ptxas_errors, parse_report, ptxas_errors, ptxas_warnings

REPORT = """ptxas info    : 4 bytes gmem
ptxas info    : Function properties for helper
ptxas         .     48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'b' for 'sm_120f'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers
ptxas info    : Compile time = 4.045 ms
ptxas info    : Compiling entry function 'a' for 'sm_120f'
ptxas info    : Function properties for a
ptxas         .     96 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 128 bytes cumulative stack size, 1024 bytes smem
"""

PTX = """.version 9.5
.visible .entry first(
)
{
	.loc	1 7 0
	bar.sync 0;
}
.visible .entry second(
)
{
	ret;
	.loc	1 20 17
	.loc	2 53 16, function_name $L__info_string1, inlined_at 1 20 17
	foo.bar %r1;
}
	.file	1 "/kdgen/templates/x.cu.j2"
	.file	2 "/kdgen/templates/device/cuda.cuh"
"""


def test_report_per_entry() -> None:
    report = parse_report(REPORT)
    # What a function that was not inlined spills counts for all: the report does not say who calls it.
    assert report == {
        "a": Resources(255, 1024, 128, 52, 64, 3),
        "b": Resources(12, 0, 0, 12, 20, 1),
    }
    assert report["a"].spill_bytes == 116


def test_ptx_line_to_template_line() -> None:
    lines = PtxLines(PTX)
    assert lines.place(6) == "templates/x.cu.j2:7"
    assert lines.place(14) == "templates/x.cu.j2:20 (in templates/device/cuda.cuh:53)"
    assert lines.place(11) == "PTX line 11", "the line table of the function before says nothing about this one"
    assert lines.entry_place("second") == "templates/x.cu.j2:20"
    assert lines.entry_place("third") == "third"


def test_errors_are_placed_and_said_once() -> None:
    log = (
        "ptxas application ptx input, line 14; error   : Unknown modifier '.bar'\n"
        "ptxas application ptx input, line 14; error   : Unknown modifier '.bar'\n"
        "ptxas error   : Entry function 'first' uses too much shared data (0x20000 bytes, 0xc000 max)\n"
        "ptxas fatal   : Ptx assembly aborted due to errors\n\0"
    )
    assert has_ptxas_errors(log)
    assert not has_ptxas_errors(REPORT)
    assert ptxas_errors(log, PTX) == [
        "templates/x.cu.j2:20 (in templates/device/cuda.cuh:53): error: Unknown modifier '.bar'",
        "templates/x.cu.j2:7: error: Entry function 'first' uses too much shared data (0x20000 bytes, 0xc000 max)",
    ]


def test_warnings() -> None:
    log = "ptxas application ptx input, line 6; warning : slow\nptxas warning : no line\n"
    assert ptxas_warnings(log, PTX) == ["templates/x.cu.j2:7: warning: slow", "ptxas: warning: no line"]
