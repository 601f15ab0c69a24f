"""`kdgen diff`: what changed between two builds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kdgen.cli.built import ABSENT, Built, BuiltPath, find_built, worst_resources
from kdgen.cli.output import print_json, print_table

Change = dict[str, Any]


def diff(
    first: BuiltPath,
    second: Annotated[Path, typer.Argument(metavar="DIR", help="The build to compare it with.", show_default=False)],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
) -> None:
    """Compare two builds: parameters, resources, size of the binary, instructions, and whether results stay the same bits.

    Example: kdgen diff generated/kimi-k2.6/sm_120 /tmp/other/kimi-k2.6/sm_120
    """
    from kdgen.errors import UsageError

    left, right = ({build.target: build for build in find_built(path)} for path in (first, second))
    if len(left) == len(right) == 1:
        pairs = [(next(iter(left.values())), next(iter(right.values())))]  # two targets of one spec may be compared as well
    else:
        pairs = [(left[target], right[target]) for target in left if target in right]
    if not pairs:
        raise UsageError(f"no target in common: {first} has {', '.join(left)}; {second} has {', '.join(right)}")
    documents = [compare_builds(*pair) for pair in pairs]
    if json:
        print_json(documents)
        return
    for (a, b), document in zip(pairs, documents, strict=True):
        _show(a, b, document)


def compare_builds(a: Built, b: Built) -> dict[str, Any]:
    """All changes from build `a` to build `b`, as JSON: kernels added, removed and changed, each change with both values."""
    kernels = {}
    for name in sorted(a.kernels.keys() & b.kernels.keys()):
        changes = list(_changes(a, b, name))
        kernels[name] = {"changes": changes, "bit_compatible": _same_bits(a.kernels[name], b.kernels[name])}
    return {
        "first": str(a.directory),
        "second": str(b.directory),
        "added": sorted(b.kernels.keys() - a.kernels.keys()),
        "removed": sorted(a.kernels.keys() - b.kernels.keys()),
        "kernels": kernels,
    }


def _same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["family"] == b["family"] and a["contract"]["pinned"] == b["contract"]["pinned"])


def _changes(first: Built, second: Built, name: str) -> Iterator[Change]:
    a, b = first.kernels[name], second.kernels[name]
    yield from _differing("parameter", a["params"], b["params"])
    yield from _differing("pinned", a["contract"]["pinned"], b["contract"]["pinned"])
    yield from _differing("resource", worst_resources(a["resources"]), worst_resources(b["resources"]))
    yield from _differing("file", _sizes(a), _sizes(b))
    if a["files"]["binary"]["sha256"] != b["files"]["binary"]["sha256"]:
        yield from _differing("instructions", _instructions(first, a), _instructions(second, b))
    arguments = ({item["name"]: _signature(item) for item in kernel["contract"]["arguments"]} for kernel in (a, b))
    yield from _differing("argument", *arguments)
    if a["hash"] != b["hash"]:
        yield {"what": "hash", "name": "", "first": a["hash"][:12], "second": b["hash"][:12]}


def _differing(what: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield {"what": what, "name": name, "first": a.get(name), "second": b.get(name)}


def _signature(argument: dict[str, Any]) -> str:
    return f"{argument['role']} {argument['dtype']}[{', '.join(map(str, argument['shape']))}]"


def _sizes(kernel: dict[str, Any]) -> dict[str, int]:
    return {f"{kind} bytes": item["bytes"] for kind, item in kernel["files"].items()}


def _instructions(build: Built, kernel: dict[str, Any]) -> dict[str, int]:
    """Counts of a kernel's instructions by kind, over all its entry points; empty for the host and without nvdisasm."""
    from kdgen.compile import sass_summary
    from kdgen.errors import ToolchainError

    if build.manifest["target"]["nvrtc_arch"] is None:
        return {}
    try:
        entries = sass_summary((build.directory / kernel["files"]["binary"]["path"]).read_bytes())
    except ToolchainError:
        return {}
    total: dict[str, int] = {}
    for entry in entries.values():
        for kind, count in entry.items():
            total[kind] = total.get(kind, 0) + count
    return total


def _show(a: Built, b: Built, document: dict[str, Any]) -> None:
    print(f"{a.directory} ({a.target}) → {b.directory} ({b.target})")
    for kind in ("added", "removed"):
        for name in document[kind]:
            print(f"{name}: {kind}")
    for name, kernel in document["kernels"].items():
        if not kernel["changes"]:
            print(f"{name}: identical")
            continue
        bits = "same result bits" if kernel["bit_compatible"] else "RESULT BITS MAY DIFFER: a pinned parameter changed"
        rows = [[change["what"], change["name"], _cell(change["first"]), _cell(change["second"])] for change in kernel["changes"]]
        print_table(f"\n{name}: {bits}", ("what", "name", "first", "second"), rows)


def _cell(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
