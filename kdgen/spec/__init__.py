"""Specs: YAML files that say which kernels to build, with which parameters, for which targets.

    spec = load_spec("specs/engines/kimi-k2.6.yaml", overrides=["tree.budget=32"])
    spec.kernel("tree_build").params.budget

A *kernel spec* holds one kernel; an *engine spec* holds a model's dimensions, its tree, drafter and cache, and the kernels made from
them. All faults of a file are reported together, as `file:line: key: value …, allowed …` (`kdgen.errors.SpecError`).
"""

from __future__ import annotations

from kdgen.spec.load import load_spec
from kdgen.spec.model import EngineSpec
from kdgen.spec.schema import json_schema, write_schemas
from kdgen.spec.spec import KernelSpec, Spec

__all__ = ["EngineSpec", "KernelSpec", "Spec", "json_schema", "load_spec", "write_schemas"]
