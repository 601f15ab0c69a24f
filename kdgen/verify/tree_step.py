"""One DDTree step through the kernels: build a tree, walk it, move the cache rows. For one sequence, on arrays of the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from kdgen.errors import UsageError
from kdgen.kernels import kv_compact, tree_build
from kdgen.kernels.cache_layout import swizzled
from kdgen.spec import KernelSpec, Spec
from kdgen.verify.compare import Array
from kdgen.verify.kernel import run_case
from kdgen.verify.schedules import Schedule

if TYPE_CHECKING:
    from kdgen.runtime import Kernel

FAMILIES = ("tree_build", "tree_accept", "kv_compact")


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one sequence.

    Attributes:
        log_probs: [L, K] float32, natural logarithms, descending.
        tokens: [L, K].
        budget: most nodes beside the root.
        root_token, start: token of node 0 and its absolute position.
        chain_seed, depth_bonus: options that the builder must have been built with.
    """

    log_probs: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int64]
    budget: int
    root_token: int
    start: int
    chain_seed: bool = False
    depth_bonus: float = 0.0


@dataclass(frozen=True)
class TreeKernels:
    """The three kernel specs a step runs through; `changes` says how they differ from the spec's own, "" if they do not."""

    build: KernelSpec
    accept: KernelSpec
    compact: KernelSpec
    changes: str = ""

    @classmethod
    def for_draft(cls, spec: Spec, draft: Draft, rows: int) -> Self:
        """The spec's own kernels where `draft` fits them (smaller drafts are padded), variants of them otherwise.

        Args:
            spec: has a kernel of each of the three families.
            draft: what they must be able to take.
            rows: cache rows the page table must reach.

        Raises:
            UsageError: a family is missing.
        """
        build, accept, compact = (_kernel_of(spec, family) for family in FAMILIES)
        changes: list[str] = []
        build = _changed(build, _build_changes(_build_params(build), draft), changes)
        size = _build_params(build)
        accept = _changed(accept, {"depth": size.depth, "budget": size.budget}, changes)
        cache = _compact_params(compact)
        pages = max(cache.max_pages, -(-rows // cache.page_size))
        compact = _changed(compact, {"depth": size.depth, "max_pages": pages}, changes)
        return cls(build, accept, compact, "; ".join(changes))

    def named(self, prefix: str) -> Self:
        """The same kernels, each called `prefix` and its family: variants of one spec need names of their own."""
        names = {part: f"{prefix}_{getattr(self, part).family.name}" for part in ("build", "accept", "compact")}
        return replace(self, **{part: replace(getattr(self, part), name=name) for part, name in names.items()})

    @property
    def kernels(self) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
        """All three."""
        return self.build, self.accept, self.compact


def _kernel_of(spec: Spec, family: str) -> KernelSpec:
    found = next((kernel for kernel in spec.kernels if kernel.family.name == family), None)
    if found is None:
        raise UsageError(f"{spec.path}: a draft tree needs kernels of the families {', '.join(FAMILIES)}; the spec has no {family}")
    return found


def _build_changes(params: tree_build.Params, draft: Draft) -> dict[str, Any]:
    """The parameters of `tree_build` that must differ for `draft`: sizes only grow, options become those of the draft."""
    depth, top_k = draft.log_probs.shape
    changes: dict[str, Any] = {}
    for name, need in (("depth", depth), ("top_k", top_k), ("budget", draft.budget)):
        if getattr(params, name) < need:
            changes[name] = need
    if params.width_cap and params.width_cap < top_k:
        changes["width_cap"] = 0
    for name, value in (("chain_seed", draft.chain_seed), ("depth_bonus", draft.depth_bonus), ("pad", False)):
        if getattr(params, name) != value:
            changes[name] = value
    return changes


def _changed(kernel: KernelSpec, need: Mapping[str, Any], changes: list[str]) -> KernelSpec:
    """The kernel with the parameters in `need`; what had to change is added to `changes`, in words."""
    wanted = {name: value for name, value in need.items() if getattr(kernel.params, name) != value}
    if not wanted:
        return kernel
    changes.append(f"{kernel.family.name} {', '.join(f'{name}={json.dumps(value)}' for name, value in wanted.items())}")
    return kernel.with_params(**wanted)


def _build_params(kernel: KernelSpec) -> tree_build.Params:
    return cast(tree_build.Params, kernel.params)


def _compact_params(kernel: KernelSpec) -> kv_compact.Params:
    return cast(kv_compact.Params, kernel.params)


@dataclass(frozen=True)
class Tree:
    """A built tree without padding; all arrays have one entry per node, the root first.

    Attributes:
        outputs: the kernel's outputs as they are, [1, …].
        count: nodes.
    """

    outputs: Mapping[str, Array]
    count: int

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name][0, : self.count]

    def ancestors(self, node: int) -> frozenset[int]:
        """The nodes on the way from the root to `node`, both included, as the kernel's path row says."""
        depth = int(self["depths"][node])
        return frozenset(int(i) for i in self["paths_out"][node, : depth + 1])

    def rank_path(self, node: int) -> tuple[int, ...]:
        """The candidate numbers from depth 1 down to `node`; -1 where a wrong kernel's path names no node of the tree."""
        depth, ranks = int(self["depths"][node]), self["node_ranks"]
        return tuple(int(ranks[i]) if i < self.count else -1 for i in self["paths_out"][node, 1 : depth + 1])


@dataclass(frozen=True)
class Walk:
    """An accepted path.

    Attributes:
        outputs: the kernel's outputs as they are, [1, …].
        accepted, committed: nodes and their tokens, the root first.
        bonus: the target's choice after the last of them.
        new_start: position of the next root.
    """

    outputs: Mapping[str, Array]
    accepted: tuple[int, ...]
    committed: tuple[int, ...]
    bonus: int
    new_start: int


def build(kernel: Kernel, spec: KernelSpec, draft: Draft, schedule: Schedule) -> Tree:
    """Run `tree_build` on a draft; depths and ranks beyond the draft's are padded with −inf, which makes no node."""
    p = _build_params(spec)
    depth, top_k = draft.log_probs.shape
    log_probs = np.full((1, p.depth, p.top_k), -np.inf, np.float32)
    tokens = np.zeros((1, p.depth, p.top_k), np.int32)
    log_probs[0, :depth, :top_k], tokens[0, :depth, :top_k] = draft.log_probs, draft.tokens
    inputs = {
        "log_probs": log_probs, "token_ids": tokens, "root_tokens": np.array([draft.root_token], np.int32),
        "starts": np.array([draft.start], np.int32), "budgets": np.array([draft.budget], np.int32),
    }  # fmt: skip
    outputs = run_case(kernel, inputs, {}, schedule.fill)
    return Tree(outputs, int(outputs["counts"][0]))


def walk(kernel: Kernel, tree: Tree, choices: npt.NDArray[np.int64], start: int, schedule: Schedule) -> Walk:
    """Run `tree_accept` on a built tree; `choices` is the target's token after each of the tree's nodes."""
    padded = np.full(tree.outputs["tokens"].shape, -1, np.int32)
    padded[0, : len(choices)] = choices
    inputs = {
        **{name: tree.outputs[name] for name in ("tokens", "parents", "depths", "counts")},
        "paths": tree.outputs["paths_out"], "choices": padded, "starts": np.array([start], np.int32),
    }  # fmt: skip
    outputs = run_case(kernel, inputs, {}, schedule.fill)
    count = int(outputs["accepted_counts"][0])
    accepted, committed = (tuple(int(i) for i in outputs[name][0, :count]) for name in ("accepted", "committed"))
    return Walk(outputs, accepted, committed, int(outputs["next_roots"][0]), int(outputs["next_starts"][0]))


def moves(kernel: Kernel, spec: KernelSpec, outcome: Walk, schedule: Schedule, *, start: int, nodes: int) -> dict[int, int] | str:
    """Run `kv_compact` on a cache whose rows can be told apart.

    Returns:
        destination to source position of each row that changed, or a sentence when a row became none of those it could have.
    """
    p = _compact_params(spec)
    first, last = start // p.page_size, (start + nodes - 1) // p.page_size
    used = last - first + 1
    # Page 0 is nobody's: every page that the sequence does not reach points there, so a stray write shows.
    table = np.zeros((1, p.max_pages), np.int32)
    table[0, first : last + 1] = np.arange(used, 0, -1)
    dtype = np.uint16 if p.dtype == "bf16" else np.uint32
    rows = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, size=(p.layers, used + 1, p.page_size, p.width), dtype=dtype)
    inputs = {
        "cache": _as_cache(swizzled(rows) if p.swizzle else rows, p.dtype), "page_tables": table,
        "starts": np.array([start], np.int32), **{name: outcome.outputs[name] for name in ("accepted", "accepted_counts")},
    }  # fmt: skip
    after = run_case(kernel, inputs, {}, schedule.fill)["cache"].view(dtype)
    after = swizzled(after) if p.swizzle else after
    found: dict[int, int] = {}
    for page, slot in np.argwhere((after != rows).any(axis=(0, 3))):
        if page == 0:
            return f"a row of a page that is not the sequence's was written (slot {slot})"
        position = (first + used - int(page)) * p.page_size + int(slot)
        source = [q for q in range(start, start + nodes) if np.array_equal(after[:, page, slot], _row(rows, table, q, p.page_size))]
        if not source:
            return f"row {position} changed to something that is no row of the tree, in at least one of {p.layers} layers"
        found[position] = source[0]
    return found


def _row(rows: Array, table: Array, position: int, page_size: int) -> Array:
    row: Array = rows[:, table[0, position // page_size], position % page_size]
    return row


def _as_cache(words: Array, dtype: str) -> Array:
    from kdgen.dtypes import numpy_dtype

    return words.view(numpy_dtype(dtype))
