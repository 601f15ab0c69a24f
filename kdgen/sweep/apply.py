"""A chosen configuration as a spec: a file that builds on the swept base spec and says only what was chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdgen.errors import UsageError
from kdgen.spec import Spec, load_spec
from kdgen.sweep.choose import ALL, Choice, by_configuration, choose
from kdgen.sweep.export import write_whole
from kdgen.sweep.recorded import Recorded


def chosen(recorded: Recorded, bucket: str = ALL) -> Choice:
    """The choice for a bucket.

    Raises:
        UsageError: no such bucket, or nothing in the store can be chosen.
    """
    choices = {
        item.bucket: item for item in choose(by_configuration(recorded.rows), recorded.incumbent, recorded.shapes, recorded.objective)
    }
    if bucket not in choices:
        known = ", ".join(choices) or "none: no stored configuration has a time for every shape"
        raise UsageError(f"{recorded.directory}: nothing to choose for bucket '{bucket}'; there are: {known}")
    return choices[bucket]


def default_path(recorded: Recorded, bucket: str) -> Path:
    """`specs/tuned/TARGET/NAME.yaml`, with the bucket in the name when it is not all shapes."""
    name = recorded.name if bucket == ALL else f"{recorded.name}-{bucket}"
    return Path("specs") / "tuned" / recorded.target / f"{name}.yaml"


def apply(recorded: Recorded, path: Path, bucket: str = ALL) -> tuple[Choice, Spec]:
    """Write the tuned spec; it is loaded once to see that it is one.

    Args:
        recorded: the stored sweep.
        path: the file; replaced when it is there.
        bucket: of shapes.

    Returns:
        the choice, and the spec that was written.

    Raises:
        UsageError: nothing can be chosen.
        SpecError: the base spec has changed so that the chosen parameters no longer fit it; nothing was written.
        KdgenError: the file cannot be written.
    """
    choice = chosen(recorded, bucket)
    text = spec_text(recorded, choice, path)
    trial = path.with_name(f".{path.name}.{os.getpid()}.check")
    write_whole(trial, text.encode())
    try:
        spec = load_spec(trial)
    finally:
        trial.unlink(missing_ok=True)
    write_whole(path, text.encode())
    return choice, load_spec(path) if spec.kernels else spec


def spec_text(recorded: Recorded, choice: Choice, path: Path) -> str:
    """The file: comments that say where it comes from, `base`, and the parameters that differ from it."""
    import yaml

    params = changed_params(recorded.params, choice.values)
    base = os.path.relpath(recorded.base_path, path.absolute().parent)
    schema = Path(recorded.base_path).parent.parent.parent / "generated" / "schema" / "kernel.json"
    kind = "measured on" if choice.measured else "predicted by the static model for"
    device = recorded.place.device if choice.measured else recorded.target
    bits = sorted(key for key in choice.values if choice.values[key] != _at(recorded.params, key) and _decides_bits(key, recorded.pinned))
    gain = f", {choice.score:.3f} of the base spec's time" if recorded.objective.score == "relative" else ""
    lines = [
        f"# yaml-language-server: $schema={os.path.relpath(schema, path.absolute().parent)}",
        f"# Tuned by kdgen sweep: {recorded.name}, configuration {choice.configuration}, {kind} {device}{gain}.",
        f"# Shapes: {'; '.join(choice.times)}.",
        *(
            [f"# Decides other bits than the base: {', '.join(bits)}. Builds that must agree bit for bit need the same values."]
            if bits
            else []
        ),
        "kind: kernel",
        f"name: {path.stem}",
        f"base: {json.dumps(base)}",
        *(["params:", *(f"  {line}" for line in yaml.safe_dump(params, sort_keys=False, width=120).splitlines())] if params else []),
        f"targets: [{recorded.target}]",
    ]
    return "\n".join(lines) + "\n"


def changed_params(params: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that differ from the base, nested. A list is given whole, since a spec replaces lists as a whole."""
    from kdgen.sweep.space import nested

    full = nested(params, values)

    def difference(before: Any, after: Any) -> Any:
        if isinstance(before, dict) and isinstance(after, dict):
            return {key: difference(before[key], value) for key, value in after.items() if before[key] != value}
        return after

    found: dict[str, Any] = difference(dict(params), full)
    return found


def _at(params: Any, path: str) -> Any:
    for part in path.split("."):
        params = params[int(part) if part.isdigit() else part]
    return params


def _decides_bits(path: str, pinned: tuple[str, ...]) -> bool:
    return any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in pinned)
