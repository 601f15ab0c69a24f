"""Rendering: a kernel's parameters and its Jinja template to CUDA C++ text, with or without `#line` marks.

source = render_kernel(spec.kernel("tree_build"), get_target("sm_120"), marks=False)
print(source.text)
"""

from __future__ import annotations

from kdgen.render.data import data_dir, device_files, templates_dir
from kdgen.render.source import Source, render_kernel

__all__ = ["Source", "data_dir", "device_files", "render_kernel", "templates_dir"]
