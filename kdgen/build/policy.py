"""What kdgen does not publish: kernels that spill registers, and kernels that do not fit their target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdgen.compile.occupancy import occupancy
from kdgen.compile.ptxas import Resources
from kdgen.contract import Contract
from kdgen.errors import ToolchainError
from kdgen.targets import Target

EntryFigures = dict[str, Any]


def figures(contract: Contract, target: Target, compiled: Mapping[str, Resources]) -> dict[str, EntryFigures]:
    """Per entry point what the manifest says about it.

    `registers` of a thread, `shared_bytes` of a block (static and the largest dynamic), `stack_bytes` and `spill_bytes` of a thread, and
    `occupancy` (0…1, of the launch with the lowest). On the host only shared memory has a figure; the others are None.
    """
    found: dict[str, EntryFigures] = {}
    for entry in contract.entries:
        launches = [launch for launch in contract.launches if launch.entry == entry]
        dynamic = max(launch.shared_bytes for launch in launches)
        if target.is_host:
            found[entry] = {"registers": None, "shared_bytes": dynamic, "stack_bytes": None, "spill_bytes": None, "occupancy": None}
            continue
        if entry not in compiled:
            raise ToolchainError(
                f"the assembler's report does not name entry {entry}: this kdgen does not know this NVRTC's reports; upgrade kdgen"
            )
        need = compiled[entry]
        fractions = [
            occupancy(target, launch.block, need.registers, need.static_shared_bytes + launch.shared_bytes).fraction for launch in launches
        ]
        found[entry] = {
            "registers": need.registers,
            "shared_bytes": need.static_shared_bytes + dynamic,
            "stack_bytes": need.stack_bytes,
            "spill_bytes": need.spill_bytes,
            "occupancy": round(min(fractions), 4),
        }
    return found


def refusals(kernel: str, target: Target, contract: Contract, compiled: Mapping[str, Resources], allow_spill: bool) -> list[str]:
    """Why a compiled kernel may not be published, with the figures; empty when it may.

    A stack without spills (an array indexed at run time) is no reason: it may be meant.
    """
    reasons = []
    for entry, figure in figures(contract, target, compiled).items():
        head = f"kernel '{kernel}' for {target.name}, entry {entry}"
        if figure["shared_bytes"] > target.shared_limit:
            static = compiled[entry].static_shared_bytes if entry in compiled else 0
            dynamic = figure["shared_bytes"] - static
            reasons.append(
                f"{head}: needs {figure['shared_bytes']:,} bytes of shared memory ({dynamic:,} dynamic, {static:,} static), "
                f"the limit is {target.shared_limit:,}: take smaller tiles or fewer stages"
            )
        if figure["spill_bytes"] and not allow_spill:
            need = compiled[entry]
            reasons.append(
                f"{head}: spills registers: {need.spill_store_bytes:,} bytes of stores and {need.spill_load_bytes:,} bytes of loads "
                f"(it uses {need.registers} registers of at most {target.max_registers}, and {need.stack_bytes:,} bytes of stack): "
                "take smaller tiles or fewer threads, or write 'allow_spill: true' beside its params"
            )
    return reasons
