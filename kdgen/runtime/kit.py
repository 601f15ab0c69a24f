"""Loading a built directory, and the kernels in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kdgen.contract import Contract
from kdgen.errors import ArtifactError, LaunchError
from kdgen.runtime.array import Array
from kdgen.runtime.call import Binder, BoundCall
from kdgen.runtime.device import Device, Program
from kdgen.runtime.manifest import FILE_NAME, KernelRecord, Manifest, read_binaries, read_manifest
from kdgen.runtime.open import gpu_count, open_device


class Kernel:
    """A loaded kernel. Calling it checks the arguments against its contract and launches it.

    Attributes:
        name: its name in the spec.
        contract: arguments, capacities, launches.
        record: everything else the manifest says about it.
        device: where it runs.
    """

    def __init__(self, record: KernelRecord, device: Device, program: Program):
        self.name = record.name
        self.contract: Contract = record.contract
        self.record = record
        self.device = device
        self._program = program
        self._binder = Binder(record.name, record.contract, device)

    def __call__(
        self, *args: Any, stream: Any = None, dims: Mapping[str, int] | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Launch on a stream; returns at once on the GPU.

        Args:
            args, kwargs: arguments in signature order or by name, without those of role `dimension`. An array is an own array, or
                anything with DLPack or `__cuda_array_interface__` (on the host: numpy arrays) on this
                device, C-contiguous and 16-byte aligned.
            stream: an own stream, an object with `__cuda_stream__`, a handle, or None for the device's default stream.
            dims: dimensions that no array's shape gives.
            options: launch options of the device (host: order, copies, seed, threads).

        Raises:
            LaunchError: the arguments are not what the kernel takes; nothing was launched.
            DeviceError: the device refused the launch; `KernelFault` when the host target found a fault in the kernel.
        """
        self.bind(*args, stream=stream, dims=dims, **kwargs).launch(stream, **(options or {}))

    def bind(self, *args: Any, stream: Any = None, dims: Mapping[str, int] | None = None, **kwargs: Any) -> BoundCall:
        """Check the arguments once, to launch many times with the same arrays; as `__call__` without launching.

        Args:
            args, kwargs, dims: as in `__call__`.
            stream: the stream that waits for what other libraries still have to do to the arrays.
        """
        return self._binder.bind(self._program, args, kwargs, dims, self.device.stream_handle(stream))

    def allocate(self, **dims: int) -> dict[str, Array]:
        """New arrays for all outputs and workspaces, by argument name, to be passed on as keywords.

        Args:
            dims: the dimensions that their shapes depend on (`S=4`).

        Raises:
            LaunchError: a dimension is missing, unknown, or beyond the kernel's capacity.
        """
        return self._binder.allocate(dims)

    def complete(self, dims: Mapping[str, int] | None = None, *, fresh: Collection[str] = (), **arrays: Any) -> dict[str, Any]:
        """These arguments, and a new array for every output and workspace that is not among them.

        Args:
            dims: dimensions that no given array's shape gives.
            fresh: arguments that the kernel reads and writes, to be made too, with undefined contents.
            arrays: arguments by name.

        Raises:
            LaunchError: a dimension is missing or beyond the kernel's capacity.
        """
        return self._binder.complete(arrays, dims or {}, fresh)

    def __repr__(self) -> str:
        return f"<kernel {self.name} ({self.contract.family}) on {self.device.name}>"


class UnknownKernelError(LaunchError, KeyError):
    """A kit has no kernel of that name."""

    __str__ = Exception.__str__


class Kit(Mapping[str, Kernel]):
    """The kernels of one built directory, by name.

    Attributes:
        manifest: of the directory.
        device: where the kernels run.
    """

    def __init__(self, manifest: Manifest, device: Device, kernels: Mapping[str, Kernel]):
        self.manifest = manifest
        self.device = device
        self._kernels = dict(kernels)

    def __getitem__(self, name: str) -> Kernel:
        try:
            return self._kernels[name]
        except KeyError:
            raise UnknownKernelError(f"no kernel '{name}' in {self.manifest.path}; it has {', '.join(self._kernels)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __repr__(self) -> str:
        return f"<kit {self.manifest.spec['name']} for {self.manifest.target.name} on {self.device.name}: {', '.join(self)}>"


def load(path: str | os.PathLike[str], device: str | Device = "auto") -> Kit:
    """Load the kernels of a built directory.

    Args:
        path: a spec's output (`generated/kimi-k2.6`; the build that fits the device best is taken), the directory of one target, or a
            manifest.
        device: what `open_device` takes, or an open device. `auto` takes a GPU when there is one that the builds run on, else the host.

    Raises:
        ArtifactError: missing, damaged, made by a newer kdgen, or not for this device.
        DeviceError: there is no such device.
    """
    place = Path(path)
    directory, opened = _choose(place, device)
    manifest, images = read_binaries(directory)
    if reason := opened.refuse(manifest.target):
        raise ArtifactError(f"{directory}: cannot run on {_describe(opened)}: {reason}; build for it with: {_build_command(opened)}")
    kernels = {name: Kernel(record, opened, opened.load(record, images[name], manifest)) for name, record in manifest.kernels.items()}
    return Kit(manifest, opened, kernels)


def _choose(place: Path, device: str | Device) -> tuple[Path, Device]:
    """The directory of one target (or the manifest) and the device."""
    if place.is_file() or (place / FILE_NAME).exists():
        if device == "auto":
            device = "host" if read_manifest(place, check_files=False).target.is_host else "cuda"
        return place, open_device(device) if isinstance(device, str) else device
    if not place.is_dir():
        raise ArtifactError(f"{place}: no such directory; make it with: kdgen build SPEC")
    built = sorted(found.parent.name for found in place.glob(f"*/{FILE_NAME}") if not found.parent.name.startswith("."))
    if not built:
        raise ArtifactError(f"{place}: neither it nor a directory in it has a {FILE_NAME}; build one with: kdgen build SPEC")
    if device != "auto":
        opened = open_device(device) if isinstance(device, str) else device
        return _best(place, built, opened), opened
    if gpu_count():
        opened = open_device("cuda")
        if "host" not in built or any(_fits(place / name, opened) for name in built):
            return _best(place, built, opened), opened
    opened = open_device("host")
    return _best(place, built, opened), opened


def _best(place: Path, built: list[str], device: Device) -> Path:
    for name in [*(name for name in device.target_names if name in built), *built]:
        if name in device.target_names or _fits(place / name, device):
            return place / name
    raise ArtifactError(f"{place} holds builds for {', '.join(built)}; {_describe(device)} needs another: {_build_command(device)}")


def _fits(directory: Path, device: Device) -> bool:
    try:
        return not device.refuse(read_manifest(directory, check_files=False).target)
    except ArtifactError:
        return False


def _describe(device: Device) -> str:
    return device.name if device.target_names[0].startswith("host") else f"{device.name} ({device.target_names[0]})"


def _build_command(device: Device) -> str:
    return f"kdgen build SPEC --arch {device.target_names[0]}"
