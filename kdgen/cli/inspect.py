"""`kdgen inspect`: what lies in a built directory."""

from __future__ import annotations

import json as json_module  # `json` is the name of the option
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kdgen.cli.built import NUMBERS, Built, BuiltPath, find_built, resource_cells, worst_resources
from kdgen.cli.output import print_json, print_table


def inspect(
    directory: BuiltPath,
    *,
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="NAME", help="Only this kernel.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the kernels of a build: resources, arguments, launches, parameters that decide result bits.

    Example: kdgen inspect generated/kimi-k2.6/sm_120 --kernel tree_build
    """
    from kdgen.errors import UsageError

    builds = find_built(directory)
    if kernel is not None and not any(kernel in build.kernels for build in builds):
        known = ", ".join(sorted({name for build in builds for name in build.kernels})) or "none"
        raise UsageError(f"{directory}: there is no kernel '{kernel}'; it holds: {known}")
    if json:
        print_json([summary(build, kernel) for build in builds])
        return
    for build in builds:
        _show(build, kernel)


def summary(build: Built, only: str | None = None) -> dict[str, Any]:
    """Everything known about a build, as JSON; `kernels` has the figures of each kernel at its top level."""
    manifest = build.manifest
    kernels = [
        {
            "name": name,
            **worst_resources(entry["resources"]),
            "family": entry["family"],
            "hash": entry["hash"],
            "params": entry["params"],
            "pinned": entry["contract"]["pinned"],
            "arguments": entry["contract"]["arguments"],
            "capacities": entry["contract"]["capacities"],
            "launches": entry["contract"]["launches"],
            "layouts": entry["contract"]["layouts"],
            "entries": entry["resources"],
            "files": entry["files"],
        }
        for name, entry in sorted(build.kernels.items())
        if only in (None, name)
    ]
    head = {key: manifest[key] for key in ("kdgen", "spec", "target", "compiler", "digest")}
    return {**head, "directory": str(build.directory), "kernels": kernels}


def _show(build: Built, only: str | None) -> None:
    spec = build.manifest["spec"]
    title = f"{spec['name']} for {build.target}, {build.manifest['compiler']}, kdgen {build.manifest['kdgen']}"
    chosen = {name: entry for name, entry in sorted(build.kernels.items()) if only in (None, name)}
    columns = ("kernel", *NUMBERS, "binary", "hash")
    rows = [
        [name, *resource_cells(entry["resources"]), f"{entry['files']['binary']['bytes']:,}", entry["hash"][:8]]
        for name, entry in chosen.items()
    ]
    print_table(title, columns, rows, right=(*NUMBERS, "binary"))
    for name, entry in chosen.items():
        contract = entry["contract"]
        arguments = [
            [item["name"], item["role"], item["dtype"], f"[{', '.join(map(str, item['shape']))}]" if item["shape"] else "", item["doc"]]
            for item in contract["arguments"]
        ]
        print_table(f"\n{name}: family {entry['family']}", ("argument", "role", "type", "shape", "meaning"), arguments, fold="meaning")
        ranges = ", ".join(f"{symbol} {limits['minimum']}…{limits['maximum']}" for symbol, limits in contract["capacities"].items())
        print(f"built for: {ranges or 'fixed shapes'}")
        for launch in contract["launches"]:
            print(f"launch: {_geometry(launch)}")
        print(f"parameters: {_pairs(entry['params'])}")
        print(f"pinned (decide result bits): {_pairs(contract['pinned'])}")
        if contract["layouts"]:
            print(f"layouts: {_pairs(contract['layouts'])}")
        print(f"hash: {entry['hash']}")


def _geometry(launch: dict[str, Any]) -> str:
    grid = " × ".join(map(str, launch["grid"]))
    text = f"{launch['entry']}, grid {grid}, {launch['block']} threads, {launch['shared_bytes']:,} B shared"
    flags = [name for name in ("cooperative", "programmatic") if launch[name]]
    when = f", when {launch['when']}" if launch["when"] else ""
    return text + "".join(f", {flag}" for flag in flags) + when


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(_flat(values))) or "none"


def _flat(values: dict[str, Any], lead: str = "") -> Iterator[tuple[str, str]]:
    """Nested parameters under the names that --set takes: `tile.n`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{lead}{key}.")
        else:
            yield f"{lead}{key}", json_module.dumps(value)
