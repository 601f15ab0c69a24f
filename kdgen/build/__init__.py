"""Builds: every kernel of a spec for every target, compiled once, published at once.

    report = build_spec(spec, [get_target("sm_120")], Path("generated"))
    report.targets[0].directory / "manifest.json"

Freshness is content: a compiled object is found again by a hash over everything that decides its bytes. Compiled objects live in a cache
shared by all builds of a user; ninja drives what is missing there; a target's directory is exchanged as a whole.
"""

from __future__ import annotations

from kdgen.build.build import build_spec
from kdgen.build.cache import ObjectCache, cache_directory
from kdgen.build.report import BuildReport, KernelReport, Progress, TargetReport

__all__ = ["BuildReport", "KernelReport", "ObjectCache", "Progress", "TargetReport", "build_spec", "cache_directory"]
