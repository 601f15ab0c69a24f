"""Reading `manifest.json`: what a built directory holds, checked before anything in it is used.

    {"schema": 1, "kdgen": version, "spec": {"name", "kind", "digest"},
     "target": {"name", "nvrtc_arch", "capability", "shared_limit", "isa" (host only)}, "compiler": text,
     "kernels": {NAME: {"family", "hash", "params", "contract", "files": {KIND: {"path", "bytes", "sha256"}},
                        "resources": {ENTRY: {"registers", "shared_bytes", "stack_bytes", "spill_bytes", "occupancy"}}}},
     "digest": SHA-256 of the rest (`manifest_digest`)}

Paths are relative to the directory of the manifest. File kinds are `source` and `binary`, and `ptx` and `sass` where kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kdgen.contract import Contract
from kdgen.errors import ArtifactError

SCHEMA = 1
FILE_NAME = "manifest.json"
_LARGEST_MANIFEST = 256 << 20  # bytes; a manifest of a thousand kernels has a few million


@dataclass(frozen=True)
class FileRecord:
    """One file of a built directory.

    Attributes:
        path: absolute or relative to the working directory, as the manifest was.
        bytes: size.
        sha256: of the contents, in hexadecimal.
    """

    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TargetRecord:
    """What a directory was built for.

    Attributes:
        name: `sm_120`, `host`, `host_asan`.
        nvrtc_arch: what NVRTC compiled for (`sm_120f`); None on the host.
        capability: compute capability.
        shared_limit: bytes of shared memory that a block may have.
        isa: instruction set that a host build needs, such as `x86-64-v3`; "" when any CPU of its architecture will do.
    """

    name: str
    nvrtc_arch: str | None
    capability: tuple[int, int]
    shared_limit: int
    isa: str = ""

    @property
    def is_host(self) -> bool:
        """True for builds that run on the CPU."""
        return self.nvrtc_arch is None

    @property
    def sanitize(self) -> bool:
        """True for builds with the sanitizers."""
        return self.name == "host_asan"


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a built directory.

    Attributes:
        name: its name in the spec.
        family: kernel family.
        hash: content hash of everything it was made from.
        params: parameters it was built with.
        contract: arguments, capacities, launches.
        files: kind to file; `binary` is always there.
        resources: entry to registers, shared_bytes, stack_bytes, spill_bytes, occupancy.
    """

    name: str
    family: str
    hash: str
    params: Mapping[str, Any]
    contract: Contract
    files: Mapping[str, FileRecord]
    resources: Mapping[str, Mapping[str, Any]]

    @property
    def binary(self) -> FileRecord:
        """The cubin or shared library."""
        return self.files["binary"]


@dataclass(frozen=True)
class Manifest:
    """A built directory.

    Attributes:
        path: of the manifest itself.
        version: of the kdgen that built it.
        spec: `name`, `kind` and `digest` of the spec.
        target: what it was built for.
        compiler: the compiler's identity.
        kernels: by name.
        digest: of everything above; equal digests mean equal contents.
        data: the JSON as it is.
    """

    path: Path
    version: str
    spec: Mapping[str, str]
    target: TargetRecord
    compiler: str
    kernels: Mapping[str, KernelRecord]
    digest: str
    data: Mapping[str, Any]

    @property
    def rebuild(self) -> str:
        """The command that builds this directory again, as far as the manifest tells."""
        return f"kdgen build SPEC --arch {self.target.name} --force (SPEC: the file of spec '{self.spec['name']}')"


def manifest_digest(data: Mapping[str, Any]) -> str:
    """SHA-256 over a manifest's JSON without its own `digest`, keys sorted, no white space."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def find_manifest(path: Path) -> Path:
    """The manifest that `path` (a manifest, or the directory of one target) means."""
    return path / FILE_NAME if path.is_dir() else path


def read_manifest(path: str | Path, *, check_files: bool = True) -> Manifest:
    """Read a manifest and check it, and by default every binary it lists.

    A build may replace the directory between two reads; then everything is read once more.

    Args:
        path: a manifest, or the directory of one target.
        check_files: also compare size and SHA-256 of the binaries.

    Raises:
        ArtifactError: missing, truncated, corrupt, or made by a newer kdgen; a binary is missing or is not the one listed.
    """
    manifest, _ = _read(path, binaries=check_files)
    return manifest


def read_binaries(path: str | Path) -> tuple[Manifest, dict[str, bytes]]:
    """Read a manifest and the checked contents of every binary it lists, by kernel; arguments and errors as in `read_manifest`."""
    return _read(path, binaries=True)


def _read(path: str | Path, *, binaries: bool) -> tuple[Manifest, dict[str, bytes]]:
    place = find_manifest(Path(path))
    try:
        return _read_once(place, binaries=binaries)
    except ArtifactError:
        # Perhaps a build swapped the directory between two reads. If the fault is real, it is there the second time too.
        return _read_once(place, binaries=binaries)


def _read_once(place: Path, *, binaries: bool) -> tuple[Manifest, dict[str, bytes]]:
    manifest = parse_manifest(place, _read_file(place, "manifest", "kdgen build SPEC"))
    if not binaries:
        return manifest, {}
    return manifest, {name: _checked(kernel.binary, name, manifest) for name, kernel in manifest.kernels.items()}


def _read_file(place: Path, what: str, remedy: str) -> bytes:
    try:
        if what == "manifest" and place.stat().st_size > _LARGEST_MANIFEST:
            raise ArtifactError(
                f"{place}: {place.stat().st_size} bytes; a manifest has at most {_LARGEST_MANIFEST}; rebuild with: {remedy}"
            )
        return place.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(f"{place}: no such {what}; make it with: {remedy}") from error
    except OSError as error:
        raise ArtifactError(f"{place}: the {what} cannot be read: {error.strerror}") from error


def _checked(record: FileRecord, kernel: str, manifest: Manifest) -> bytes:
    content = _read_file(record.path, f"binary (of kernel '{kernel}')", manifest.rebuild)
    if len(content) != record.bytes:
        size = f"{len(content)} bytes, the manifest says {record.bytes}"
        raise ArtifactError(f"{record.path}: {size}: truncated or replaced; rebuild with: {manifest.rebuild}")
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise ArtifactError(f"{record.path}: its SHA-256 is not the manifest's: damaged or replaced; rebuild with: {manifest.rebuild}")
    return content


def parse_manifest(place: Path, content: bytes) -> Manifest:
    """A manifest from the bytes of its file; `place` is the path that messages and file records refer to.

    Raises:
        ArtifactError: truncated, corrupt, of another shape, or made by a newer kdgen.
    """
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{place}: truncated or corrupt, not JSON ({error}); rebuild with: kdgen build SPEC") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise ArtifactError(f"{place}: not a kdgen manifest: it has no schema number; rebuild with: kdgen build SPEC")
    if data["schema"] > SCHEMA:
        raise ArtifactError(
            f"{place}: made by a newer kdgen ({data.get('kdgen', 'unknown')}; manifest schema {data['schema']}, this one reads "
            f"up to {SCHEMA}): upgrade kdgen, or rebuild with: kdgen build SPEC"
        )
    if data["schema"] < SCHEMA:
        raise ArtifactError(f"{place}: manifest schema {data['schema']} is too old (need {SCHEMA}); rebuild with: kdgen build SPEC")
    if data.get("digest") != manifest_digest(data):
        raise ArtifactError(f"{place}: corrupt or edited: its contents do not match its digest; rebuild with: kdgen build SPEC")
    try:
        target = data["target"]
        spec = {key: str(data["spec"][key]) for key in ("name", "kind", "digest")}
        record = TargetRecord(
            str(target["name"]), target["nvrtc_arch"], (int(target["capability"][0]), int(target["capability"][1])),
            int(target["shared_limit"]), str(target.get("isa") or ""),
        )  # fmt: skip
        kernels = {name: _kernel(place.parent, name, item) for name, item in data["kernels"].items()}
        return Manifest(place, str(data["kdgen"]), spec, record, str(data["compiler"]), kernels, data["digest"], data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ArtifactError(
            f"{place}: not what a manifest looks like ({type(error).__name__}: {error}); rebuild with: kdgen build SPEC"
        ) from error


def _kernel(directory: Path, name: str, item: Mapping[str, Any]) -> KernelRecord:
    files = {kind: _file(directory, record) for kind, record in item["files"].items()}
    if "binary" not in files:
        raise KeyError(f"kernels.{name}.files.binary")
    contract = Contract.from_json(item["contract"])
    return KernelRecord(name, str(item["family"]), str(item["hash"]), item["params"], contract, files, item["resources"])


def _file(directory: Path, record: Mapping[str, Any]) -> FileRecord:
    path = PurePosixPath(record["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"file path '{path}' leaves the directory")
    return FileRecord(directory / path, int(record["bytes"]), str(record["sha256"]))
