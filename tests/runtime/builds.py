"""Built directories to load, made without the compiler: a few kernels in plain C++ behind the host target's launch functions."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.runtime.manifest import manifest_digest

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#ifdef POISON
#include <sanitizer/asan_interface.h>
#endif
struct LaunchConfig {
  uint32_t grid[3], block, shared_bytes, cooperative, threads, order, copies;
  uint64_t seed;
};
template <class T> static T* array(void* const* args, int i) { return *static_cast<T* const*>(args[i]); }
template <class T> static T scalar(void* const* args, int i) { return *static_cast<const T*>(args[i]); }

// scale(x f32 [T, 4], rows i32, factor f32, out f32 [T, 4]); block b does row b
extern "C" int kdgen_launch_scale(void* const* args, const LaunchConfig* c, char*, unsigned long) {
  if (c->block != 32 || c->shared_bytes != 1024 || scalar<int>(args, 1) != static_cast<int>(c->grid[0])) return 1;
  for (unsigned b = 0; b < c->grid[0]; b++)
    for (int i = 0; i < 4; i++) array<float>(args, 3)[b * 4 + i] = array<const float>(args, 0)[b * 4 + i] * scalar<float>(args, 2);
  return 0;
}
// The second launch of `scale` for T > 4: adds 1.
extern "C" int kdgen_launch_scale_more(void* const* args, const LaunchConfig* c, char*, unsigned long) {
  for (unsigned i = 0; i < c->grid[0] * 4; i++) array<float>(args, 3)[i] += 1;
  return 0;
}
// probe(out u64 [8]): what the launch was given
extern "C" int kdgen_launch_probe(void* const* args, const LaunchConfig* c, char*, unsigned long) {
  const uint64_t seen[8] = {c->grid[0], c->grid[1], c->grid[2], c->cooperative, c->threads, c->order, c->copies, c->seed};
  std::memcpy(array<uint64_t>(args, 0), seen, sizeof seen);
  return 0;
}
// stray(out i32 [N], offset i32): writes out[offset]
extern "C" int kdgen_launch_stray(void* const* args, const LaunchConfig*, char* message, unsigned long bytes) {
  const int at = scalar<int>(args, 1);
  if (at == 1000) {
    std::snprintf(message, bytes, "templates/stray.cu.j2:7: deadlock, by thread 3");
    return 1;
  }
  array<int>(args, 0)[at] = 7;
  return 0;
}
extern "C" int kdgen_launch_types(void* const* args, const LaunchConfig*, char*, unsigned long) {
  uint64_t* out = array<uint64_t>(args, 0);
  out[0] = scalar<uint16_t>(args, 1);
  out[1] = scalar<int8_t>(args, 2);
  std::memcpy(out + 2, args[3], 8);
  out[3] = scalar<uint64_t>(args, 4);
  return 0;
}
extern "C" int kdgen_launch_copy(void* const* args, const LaunchConfig*, char*, unsigned long) {
  std::memcpy(array<char>(args, 1), array<char>(args, 0), 16);
  return 0;
}
extern "C" void kdgen_release() {}
extern "C" void kdgen_poison(void* p, unsigned long n, int on) {
#ifdef POISON
  if (on) __asan_poison_memory_region(p, n); else __asan_unpoison_memory_region(p, n);
#else
  (void)p, (void)n, (void)on;
#endif
}
"""

CONTRACTS: dict[str, Contract] = {
    "scale": Contract(
        "scale",
        (
            Argument("x", "f32", ("T", 4)),
            Argument("rows", "i32", ("T",), "dimension"),
            Argument("factor", "f32", (), "scalar"),
            Argument("out", "f32", ("T", 4), "out"),
        ),
        {"T": Capacity(1, 8)},
        (Launch("scale", ("T", 1, 1), 32, 1024), Launch("scale_more", ("T", 1, 1), 32, when="T > 4")),
    ),
    "probe": Contract(
        "probe", (Argument("out", "u64", (8,), "out"),), {"S": Capacity(1, 9)}, (Launch("probe", ("S", "ceil_div(S, 2)", 3), 32),)
    ),
    "stray": Contract(
        "stray", (Argument("out", "i32", ("N",), "out"), Argument("at", "i32", (), "scalar")), {}, (Launch("stray", (1, 1, 1), 32),)
    ),
    "types": Contract(
        "types",
        (
            Argument("out", "u64", (4,), "out"),
            Argument("b", "bf16", (), "scalar"),
            Argument("c", "i8", (), "scalar"),
            Argument("d", "f64", (), "scalar"),
            Argument("e", "u64", (), "scalar"),
        ),
        {},
        (Launch("types", (1, 1, 1), 32),),
    ),
    "copy": Contract(
        "copy",
        (Argument("a", "bf16", ("S", "2 * S")), Argument("b", "bf16", ("S", "2 * S"), "inout")),
        {},
        (Launch("copy", (1, 1, 1), 32),),
    ),
    "batch": Contract("batch", (Argument("a", "i32", ("S",)),), {"S": Capacity(1, 4)}, (Launch("probe", (1, 1, 1), 32),)),
}


def compile_library(path: Path, *flags: str, source: str = SOURCE) -> bytes:
    """Compile the kernels; returns the shared library."""
    path.with_suffix(".cpp").write_text(source)
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *flags, "-o", path, path.with_suffix(".cpp")], check=True)
    return path.read_bytes()


def write_build(directory: Path, binaries: dict[str, bytes], contracts: dict[str, Contract] = CONTRACTS, **target: Any) -> Path:
    """Write a built directory with its manifest; `target` changes fields of the host's."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"name": "host", "nvrtc_arch": None, "capability": [0, 0], "shared_limit": 232_448, **target}
    suffix = "so" if fields["nvrtc_arch"] is None else "cubin"
    kernels = {}
    for name, contract in contracts.items():
        image = binaries[name]
        path = f"{name}.{suffix}"
        (directory / path).write_bytes(image)
        record = {"path": path, "bytes": len(image), "sha256": hashlib.sha256(image).hexdigest()}
        kernels[name] = {
            "family": contract.family, "hash": f"hash of {name}", "params": {"size": 4}, "contract": contract.to_json(),
            "files": {"source": record, "binary": record}, "resources": {},
        }  # fmt: skip
    write_manifest(
        directory,
        {
            "schema": 1, "kdgen": "0.1.0", "spec": {"name": "small", "kind": "kernel", "digest": "d"}, "target": fields,
            "compiler": f"a compiler for {platform.machine()}", "kernels": kernels,
        },
    )  # fmt: skip
    return directory


def write_manifest(directory: Path, data: dict[str, Any]) -> None:
    """Write a manifest with the digest of its contents."""
    data = {**data, "digest": manifest_digest(data)}
    (directory / "manifest.json").write_text(json.dumps(data, sort_keys=True, indent=1))


def edit_manifest(directory: Path, change: Any) -> None:
    """Let `change` edit a manifest's JSON in place; the digest fits afterwards."""
    data = json.loads((directory / "manifest.json").read_text())
    change(data)
    write_manifest(directory, data)
