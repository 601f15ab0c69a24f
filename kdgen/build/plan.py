"""The plan of a build: what every kernel of a spec looks like for a target, and the unit that compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdgen.build.unit import Unit
from kdgen.compile.host import host_options
from kdgen.compile.host_compiler import find_host_compiler
from kdgen.compile.identity import compiler_id
from kdgen.compile.nvrtc import cuda_options
from kdgen.targets import Target

if TYPE_CHECKING:
    from kdgen.render import Source
    from kdgen.spec import KernelSpec, Spec


@dataclass(frozen=True)
class KernelPlan:
    """One kernel for one target.

    Attributes:
        kernel: as the spec has it.
        source: rendered for people, without line marks.
        unit: compiles the marked text.
    """

    kernel: KernelSpec
    source: Source
    unit: Unit

    @property
    def source_file(self) -> str:
        """The published name of its source."""
        return self.unit.file_name


@dataclass(frozen=True)
class TargetPlan:
    """All kernels for one target.

    Attributes:
        target: what they are for.
        compiler: its identity.
        isa: instruction set of a host build; "" on a GPU.
        headers: device files, by include name.
        kernels: in the order of the spec.
        runtime: compiles the host runtime; None on a GPU.
    """

    target: Target
    compiler: str
    isa: str
    headers: Mapping[str, str]
    kernels: tuple[KernelPlan, ...]
    runtime: Unit | None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Everything to compile; the host runtime first."""
        return (*((self.runtime,) if self.runtime else ()), *(kernel.unit for kernel in self.kernels))


def plan_target(spec: Spec, target: Target) -> TargetPlan:
    """Render every kernel of a spec for a target.

    Raises:
        RenderError: a template is wrong.
        ToolchainError: there is no compiler for the target.
    """
    from kdgen.render import device_files, render_kernel

    compiler = compiler_id(target)
    headers = device_files(target)
    if target.is_host:
        host = find_host_compiler()
        options, isa, suffix = host_options(target, host), host.isa, "cpp"
        runtime = Unit("host_runtime", f"{target.name} runtime", target.name, "", "", headers, None, options, compiler)
    else:
        isa, suffix = "", "cu"
        runtime = None
    kernels = []
    for kernel in spec.kernels:
        if not target.is_host:
            options = cuda_options(target, device_runtime=kernel.family.device_runtime)
        marked = render_kernel(kernel, target, marks=True)
        unit = Unit(
            "host" if target.is_host else "cuda",
            f"{target.name} {kernel.name}",
            target.name,
            f"{kernel.name}.{suffix}",
            marked.text,
            headers,
            marked.contract.to_json(),
            options,
            compiler,
            runtime.key if runtime else "",
        )
        kernels.append(KernelPlan(kernel, render_kernel(kernel, target, marks=False), unit))
    return TargetPlan(target, compiler, isa, headers, tuple(kernels), runtime)
