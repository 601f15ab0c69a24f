"""A cubin in a GPU, and launches of its entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdgen.contract import DTYPE_BYTES, Contract, Launch
from kdgen.errors import ArtifactError, LaunchError
from kdgen.runtime.array import ParameterBlock
from kdgen.runtime.cuda_driver import check, core, driver, driver_version
from kdgen.runtime.manifest import KernelRecord, Manifest

if TYPE_CHECKING:
    from kdgen.runtime.cuda import CudaDevice

_PLAIN_SHARED_BYTES = 48 * 1024  # more needs to be asked for


class CudaProgram:
    """A loaded cubin.

    Args:
        device: to load it on.
        record: the kernel's part of the manifest.
        image: the cubin.
        manifest: where it comes from.

    Raises:
        ArtifactError: the driver refuses it, it lacks an entry or takes other arguments, or the device has too little shared memory.
    """

    def __init__(self, device: CudaDevice, record: KernelRecord, image: bytes, manifest: Manifest):
        self.device = device
        self.kernel = record.name
        self._kernels: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        with device.current():
            # Kernel objects keep the library loaded.
            code = core.ObjectCode.from_cubin(image, name=record.name)
            for entry in record.contract.entries:
                try:
                    self._kernels[entry] = code.get_kernel(entry)
                except Exception as error:  # each reason has its own class, all private to cuda.core
                    raise self._refused(entry, error, record, manifest) from error
                # A CUkernel may stand wherever a CUfunction is asked for.
                self._functions[entry] = driver.CUfunction(int(self._kernels[entry].handle))
                self._check_signature(entry, record.contract)
            self._allow_shared(record.contract)

    def _refused(self, entry: str, error: Exception, record: KernelRecord, manifest: Manifest) -> ArtifactError:
        chip = self.device.target_names[0]
        return ArtifactError(
            f"{record.binary.path}, entry '{entry}': the driver does not accept the cubin ({error}). It was made by "
            f"{manifest.compiler} for {manifest.target.nvrtc_arch}; the driver knows CUDA {driver_version()}, the GPU is {chip}. "
            f"Update the driver, or rebuild with an NVRTC of the driver's version: kdgen build SPEC --arch {chip} --force"
        )

    def _check_signature(self, entry: str, contract: Contract) -> None:
        # A mismatch would make the kernel read its arguments from the wrong places.
        pointers = ("in", "out", "inout", "workspace")
        expected = [8 if argument.role in pointers else DTYPE_BYTES[argument.dtype] for argument in contract.arguments]
        found = _parameter_sizes(driver.CUkernel(int(self._kernels[entry].handle)), len(expected))
        if found != expected:
            raise ArtifactError(
                f"kernel '{self.kernel}', entry '{entry}': the cubin takes arguments of {found} bytes, the manifest says {expected}; "
                "they do not belong together: rebuild with kdgen build SPEC --force"
            )

    def _allow_shared(self, contract: Contract) -> None:
        need: dict[str, int] = {}
        for launch in contract.launches:
            need[launch.entry] = max(need.get(launch.entry, 0), launch.shared_bytes)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for entry, size in need.items():
            if size > self.device.shared_limit:
                raise ArtifactError(
                    f"kernel '{self.kernel}', entry '{entry}' needs {size:,} bytes of shared memory per block; {self.device.name} "
                    f"({self.device.target_names[0]}) has {self.device.shared_limit:,}: build it for this GPU, or with smaller tiles"
                )
            if size > _PLAIN_SHARED_BYTES:
                handle = self._kernels[entry].handle
                status = driver.cuKernelSetAttribute(attribute, size, handle, driver.CUdevice(self.device.ordinal))
                check(status, f"kernel '{self.kernel}': allowing {size:,} bytes of shared memory")

    def function(self, entry: str) -> Any:
        """The driver's handle of an entry."""
        return self._functions[entry]

    def prepare(self, launch: Launch, grid: tuple[int, int, int], values: Sequence[int], arrays: Sequence[tuple[str, Any]]) -> CudaLaunch:
        """Make one launch ready."""
        return CudaLaunch(self, launch, grid, values, arrays)


class CudaLaunch:
    """One grid launch with all values in place. It holds its program and its arrays."""

    def __init__(
        self, program: CudaProgram, launch: Launch, grid: tuple[int, int, int], values: Sequence[int], arrays: Sequence[tuple[str, Any]]
    ):
        self._program = program
        self._device = program.device
        self._parameters = ParameterBlock(values)
        self._arrays = arrays
        self._launch = launch
        self._function = program.function(launch.entry)
        self._plain = (self._function, *grid, launch.block, 1, 1, launch.shared_bytes)
        self._config = self._extended(launch, grid) if launch.cooperative or launch.programmatic else None

    @staticmethod
    def _extended(launch: Launch, grid: tuple[int, int, int]) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        attributes = []
        if launch.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if launch.programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def launch(self, stream: int, **options: Any) -> None:
        """Give it to the stream with this handle; returns at once."""
        if options:
            raise LaunchError(f"'{next(iter(options))}' is an option of the host device; a GPU has no launch options")
        device = self._device
        if device.is_current():
            status = self._give(stream)
        else:
            with device.current():
                status = self._give(stream)
        if status[0] != 0:
            where = f"'{self._launch.entry}' of kernel '{self._program.kernel}' on {device.name}"
            what = f"grid {self._plain[1:4]}, {self._launch.block} threads, {self._launch.shared_bytes:,} bytes of shared memory"
            check(status, f"launching {where} ({what})")
        if device.captures:
            # Whichever stream this is, it may be part of a capture through an event.
            for graph in device.captures.values():
                graph.keep(self)

    def _give(self, stream: int) -> Any:
        if self._config is None:
            return driver.cuLaunchKernel(*self._plain, stream, self._parameters.address, 0)
        self._config.hStream = stream
        return driver.cuLaunchKernelEx(self._config, self._function, self._parameters.address, 0)


def _parameter_sizes(kernel: Any, expected: int) -> list[int]:
    """Bytes of each parameter. Drivers before CUDA 13.1 cannot count them, and asking for one too many is an error that tools report: only
    the `expected` ones are asked for there.
    """
    try:
        count = check(driver.cuKernelGetParamCount(kernel), "counting a kernel's parameters")
    except (AttributeError, RuntimeError):  # not in the bindings, not in the driver
        count = expected
    sizes = list[int]()
    for i in range(count):
        status, _, size = driver.cuKernelGetParamInfo(kernel, i)
        if status != driver.CUresult.CUDA_SUCCESS:
            break
        sizes.append(int(size))
    return sizes
