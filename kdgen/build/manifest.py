"""Writing `manifest.json`: everything a loader needs, nothing that differs between two equal builds. `kdgen.runtime.manifest` reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kdgen
from kdgen.contract import Contract
from kdgen.targets import Target

SCHEMA = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class ManifestKernel:
    """One kernel of a manifest.

    Attributes:
        family: its family's name.
        hash: content hash of its source.
        params: as JSON.
        contract: arguments, capacities, launches.
        files: kind (`source`, `binary`, `ptx`, `sass`) to path within the directory.
        resources: entry to figures (`kdgen.build.policy.figures`).
    """

    family: str
    hash: str
    params: Mapping[str, Any]
    contract: Contract
    files: Mapping[str, str]
    resources: Mapping[str, Mapping[str, Any]]


def manifest_bytes(
    *,
    spec: Mapping[str, str],
    target: Target,
    isa: str,
    compiler: str,
    kernels: Mapping[str, ManifestKernel],
    contents: Mapping[str, bytes],
) -> bytes:
    """The manifest of one target's directory.

    Args:
        spec: `name`, `kind`, `digest`.
        target: what it was built for.
        isa: instruction set of the host build; "" on a GPU.
        compiler: its identity.
        kernels: by name.
        contents: path to bytes of every file that a kernel names.
    """
    facts: dict[str, Any] = {
        "name": target.name,
        "nvrtc_arch": target.nvrtc_arch,
        "capability": list(target.capability),
        "shared_limit": target.shared_limit,
    }
    if target.is_host:
        facts["isa"] = isa
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kdgen": kdgen.__version__,
        "spec": dict(spec),
        "target": facts,
        "compiler": compiler,
        "kernels": {
            name: {
                "family": kernel.family,
                "hash": kernel.hash,
                "params": dict(kernel.params),
                "contract": kernel.contract.to_json(),
                "files": {kind: _record(path, contents[path]) for kind, path in kernel.files.items()},
                "resources": {entry: dict(figures) for entry, figures in kernel.resources.items()},
            }
            for name, kernel in kernels.items()
        },
    }
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


def _record(path: str, content: bytes) -> dict[str, Any]:
    return {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
