"""A kernel's parameters and template to the CUDA C++ text that is compiled, and published for reading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kdgen
from kdgen.contract import Contract
from kdgen.errors import RenderError
from kdgen.kernels.base import SharedLayout
from kdgen.render.data import device_files, main_header, templates_dir
from kdgen.render.numbers import Numbers, checked, parameters
from kdgen.render.signature import check_names, host_entries, signature
from kdgen.render.template import render_template, template_files
from kdgen.spec.spec import KernelSpec
from kdgen.targets import Target

_RESERVED = ("p", "shared", "target", "kernel", "range", "namespace")


@dataclass(frozen=True)
class Source:
    """Rendered source of one kernel for one target.

    Attributes:
        name: the kernel's name in its spec.
        text: CUDA C++ (or C++ for the host), complete but for the files of `device_files`.
        contract: what the compiled kernel promises.
        shared: where its shared-memory regions are.
        content_hash: sha256 of everything that decides the text: parameters, templates, device headers, target, generator.
    """

    name: str
    text: str
    contract: Contract
    shared: SharedLayout
    content_hash: str


def render_kernel(kernel: KernelSpec, target: Target, marks: bool = False) -> Source:
    """Render a kernel.

    Args:
        kernel: name, family and parameters.
        target: what the text is for.
        marks: put `#line` directives into the text, which lead compiler messages to the template. Everything else, the hash
            included, is the same without.

    Raises:
        RenderError: the template, or what its family gives it, is wrong; names template and line.
    """
    family, params = kernel.family, kernel.params
    template = f"{family.name}.cu.j2"
    try:
        contract = family.contract(params, target)
        shared = family.shared(params, target)
        numbers = _context(family.context(params, target))
        check_names(contract)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise RenderError(f"kernel '{kernel.name}' (family {family.name}) for {target.name}: {error}") from error
    files = template_files(templates_dir(), template)
    declared: set[str] = set()
    context = {
        **numbers,
        "p": parameters(params),
        "shared": Numbers("shared", shared.offsets),
        "target": Numbers("target", _facts(target)),
        "kernel": signature(contract, declared),
    }
    clean, body = render_template(templates_dir(), template, context, marks)
    missing = [entry for entry in contract.entries if entry not in declared]
    if missing:
        raise RenderError(f'templates/{template}: never declares {{{{ kernel("{missing[0]}") }}}}, which the contract launches')
    digest = _content_hash(kernel=kernel, target=target, contract=contract, shared=shared, numbers=numbers, files=files, clean=clean)
    text = _head(kernel, target, digest) + body
    if target.is_host:
        # Marks of the body must not reach into the glue.
        text = _ended(text) + ('#line 1 "generated entry functions"\n' if marks else "") + host_entries(contract, shared)
    return Source(kernel.name, _ended(text), contract, shared, digest)


def _context(values: Mapping[str, Any]) -> dict[str, Any]:
    for name in values:
        if name in _RESERVED:
            raise ValueError(f"its context has '{name}', which is taken; taken are: {', '.join(_RESERVED)}")
        if not name.isidentifier():
            raise ValueError(f"its context has '{name}', which is no name")
    return {name: checked(name, value) for name, value in values.items()}


def _facts(target: Target) -> dict[str, Any]:
    """What a template may ask of its target: capabilities and sizes, never an architecture number."""
    return {
        "name": target.name,
        "is_host": target.is_host,
        "bulk_copy": target.bulk_copy,
        "sms": target.sms,
        "shared_limit": target.shared_limit,
        "max_registers": target.max_registers,
    }


def _content_hash(
    *,
    kernel: KernelSpec,
    target: Target,
    contract: Contract,
    shared: SharedLayout,
    numbers: Mapping[str, Any],
    files: Mapping[str, bytes],
    clean: str,
) -> str:
    def sha(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    content = {
        "kdgen": kdgen.__version__,
        "kernel": kernel.name,
        "family": kernel.family.name,
        "target": target.name,
        "params": kernel.params.model_dump(mode="json"),
        "contract": contract.to_json(),
        "shared": {"offsets": dict(shared.offsets), "total": shared.total, "red_zones": shared.red_zones},
        "numbers": dict(numbers),
        "templates": {name: sha(data) for name, data in files.items()},
        "device": {name: sha(text.encode()) for name, text in device_files(target).items()},
        # The text itself too: it depends on code of the generator that has no version of its own.
        "text": sha(clean.encode()),
        "head": sha(_head(kernel, target, "").encode()),
    }
    return sha(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _head(kernel: KernelSpec, target: Target, digest: str) -> str:
    """The comment that says what this text is, and the include it stands on."""
    rows = list(_parameter_rows(kernel.params.model_dump(mode="json")))
    width = max((len(name) for name, _ in rows), default=0)
    lines = [
        f"{kernel.name}: {' '.join(kernel.family.summary.split())}",
        "",
        f"family {kernel.family.name}, target {target.name}" + (f" (compiled as {target.nvrtc_arch})" if target.nvrtc_arch else ""),
        *(f"    {name:<{width}} = {value}" for name, value in rows),
        f"content {digest}",
        f"Generated by kdgen {kdgen.__version__}; edit the template, not this file.",
    ]
    comment = "".join(f"// {line}".rstrip() + "\n" for line in lines)
    define = "" if target.is_host else f"#define KD_HAS_BULK_COPY {int(target.bulk_copy)}\n"
    return f'{comment}\n{define}#include "{main_header(target)}"\n\n'


def _parameter_rows(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _parameter_rows(item, f"{name}.{key}" if name else key)
    else:
        # JSON keeps a text on its line, and from ending in a backslash that would continue the comment.
        yield name, json.dumps(value)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"
