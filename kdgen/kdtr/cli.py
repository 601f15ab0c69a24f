"""`kdgen kdtr`: look into KDTR files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A KDTR file.")]


@app.command()
def ls(file: FileArgument, json: Annotated[bool, typer.Option("--json", help="Print attributes and tensors as JSON.")] = False) -> None:
    """List the tensors of a file, with dtype, shape, offset, size and checksum, and its attributes. Reads no contents.

    Example: kdgen kdtr ls tests/golden/ddtree.kdtr
    """
    import json as encoder

    from kdgen.kdtr.reader import Reader

    with Reader(file) as reader:
        tensors = list(reader.tensors.values())
        if json:
            rows = [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "offset": t.offset, "bytes": t.bytes, "crc32": f"{t.crc:08x}"}
                for t in tensors
            ]
            found = {"attributes": reader.attributes, "alignment": reader.alignment, "tensors": rows}
            print(encoder.dumps(found, indent=1, sort_keys=True, ensure_ascii=False))
            return
        table = [("name", "dtype", "shape", "offset", "bytes", "crc32")]
        table += [(t.name, t.dtype, str(list(t.shape)), f"{t.offset:,}", f"{t.bytes:,}", f"{t.crc:08x}") for t in tensors]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        for row in table:
            left = "  ".join(text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True))
            right = "  ".join(text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True))
            print(f"{left}  {right}")
        for name, value in sorted(reader.attributes.items()):
            print(f"{name} = {encoder.dumps(value, ensure_ascii=False)}")


@app.command()
def cat(
    file: FileArgument,
    name: Annotated[str, typer.Argument(metavar="TENSOR", help="The tensor to print.")],
    part: Annotated[str, typer.Option("--slice", metavar="SLICE", help="A part of it, as in numpy: 0:4,:")] = "",
    full: Annotated[bool, typer.Option("--full", help="Print every element, however many there are.")] = False,
) -> None:
    """Print a tensor's values, or a part of them. Reads only what it prints; int4 is shown as the integers.

    Example: kdgen kdtr cat tests/golden/ddtree.kdtr worked/tokens --slice 0:2,:
    """
    import sys

    import numpy as np

    from kdgen.kdtr.reader import Reader

    with Reader(file) as reader:
        values = select(reader, name, part)
        if values.dtype.kind not in "iuf":
            values = values.astype(np.float32)  # bf16: numpy prints its own types better
        print(np.array2string(values, threshold=sys.maxsize if full else 1000, max_line_width=120))


@app.command()
def check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="KDTR files.")]) -> None:
    """Read whole files and compare their checksums; leaves with 1 when one is damaged.

    Example: kdgen kdtr check weights/*.kdtr
    """
    from kdgen.errors import ArtifactError
    from kdgen.kdtr.reader import Reader

    bad = 0
    for file in files:
        try:
            with Reader(file) as reader:
                faults = list(reader.faults())
                size = sum(tensor.bytes for tensor in reader.tensors.values())
                summary = f"{file}: ok, {len(reader)} tensors, {size:,} bytes"
        except ArtifactError as error:
            faults, summary = [str(error)], ""
        bad += bool(faults)
        print("\n".join(faults) or summary)
    if bad:
        raise typer.Exit(1)


def select(reader: Any, name: str, part: str) -> Any:
    """A tensor, or the part of it that `--slice` names, as an array of values.

    Raises:
        ArtifactError: there is no such tensor.
        UsageError: the slice is none, or does not fit the tensor.
    """
    from kdgen.errors import UsageError
    from kdgen.kdtr.int4 import unpack_int4

    tensor, values = reader.entry(name), reader[name]
    axes = parse_slice(part)
    if len(axes) > len(tensor.shape):
        raise UsageError(f"--slice {part}: {len(axes)} axes, but '{name}' has {len(tensor.shape)}: {list(tensor.shape)}")
    for axis, (index, extent) in enumerate(zip(axes, tensor.shape, strict=False)):
        if isinstance(index, int) and not -extent <= index < extent:
            raise UsageError(f"--slice {part}: index {index} of axis {axis}, which has {extent} elements")
    if tensor.dtype != "int4":
        return values[axes]
    # The last axis is packed: cut the others first, so that little is unpacked.
    rows = values[axes[: len(tensor.shape) - 1]]
    return unpack_int4(rows)[(..., *axes[len(tensor.shape) - 1 :])]


def parse_slice(text: str) -> tuple[int | slice, ...]:
    """`0:4,:,-1` as numpy's indices; UsageError when it is something else."""
    from kdgen.errors import UsageError

    axes: list[int | slice] = []
    try:
        for item in text.split(",") if text.strip() else ():
            bounds = [int(bound) if bound.strip() else None for bound in item.split(":")]
            if len(bounds) == 1 and bounds[0] is not None:
                axes.append(bounds[0])
            elif 2 <= len(bounds) <= 3 and bounds[2:] != [0]:
                axes.append(slice(*bounds))
            else:
                raise ValueError(item)
    except ValueError as error:
        raise UsageError(f"--slice {text}: not a slice; write one index or start:stop:step for each axis, as in 0:4,:,-1") from error
    return tuple(axes)
