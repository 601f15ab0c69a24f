"""From a sweep file to a checked `SweepSpec`, with every fault of the file reported at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kdgen.errors import SpecError
from kdgen.expressions import ExpressionError, evaluate, names_in
from kdgen.spec import KernelSpec, load_spec
from kdgen.spec.document import Document, Path
from kdgen.spec.explain import shown, validate
from kdgen.spec.fields import fields_at
from kdgen.spec.yaml_marks import read_document
from kdgen.sweep.model import MOST_VALUES, Objective, Shapes, SweepFile, Values, written_out
from kdgen.sweep.space import Axis, Rule, Space, configuration_id, expression_name, nested, paths_of
from kdgen.targets import Target

#: Facts of the target that expressions may use.
TARGET_FACTS = ("sms", "shared_limit", "shared_per_sm", "registers_per_sm", "max_warps", "bulk_copy")


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, for one target.

    Attributes:
        name: of the sweep.
        path, base_path: the sweep's file and the base spec's.
        kernel: the base spec's kernel; its own parameters are the incumbent.
        target: what is compiled for.
        space: what is tried.
        shapes: the shapes to serve, as the file asks for them.
        objective: what is to be small.
        faults: for later faults of the file: where `shapes` stand.
    """

    name: str
    path: str
    base_path: str
    kernel: KernelSpec
    target: Target
    space: Space
    shapes: tuple[Shapes, ...]
    objective: Objective
    document: Document

    @property
    def incumbent(self) -> dict[str, Any]:
        """The base spec's own values of the swept parameters."""
        known = paths_of(self.kernel.params.model_dump(mode="json"))
        return {axis.path: known[axis.path] for axis in self.space.axes}

    @property
    def incumbent_id(self) -> str:
        """The configuration of the base spec itself."""
        return configuration_id(self.incumbent)

    def kernel_of(self, values: Mapping[str, Any]) -> KernelSpec:
        """The kernel with these values; SpecError when its family does not admit them."""
        document = Document(f"kernel '{self.kernel.name}'")
        params = nested(self.kernel.params.model_dump(mode="json"), values)
        document.data = {"params": params}
        valid = validate(self.kernel.family.params, document, ("params",), params)
        if valid is None:
            raise SpecError(document.faults)
        return replace(self.kernel, params=valid)

    def digest(self) -> str:
        """The *spec hash* of stored rows: everything beside a configuration's own values that decides its time.

        It covers the base's parameters beside the swept ones, family, target, the family's template and its device headers, but not
        space, shapes and objective, so that a sweep that was changed there finds its rows again.
        """
        from kdgen.render.data import device_files, templates_dir
        from kdgen.render.template import template_files

        params = nested(self.kernel.params.model_dump(mode="json"), dict.fromkeys(axis.path for axis in self.space.axes))
        files = {
            **{name: hashlib.sha256(text.encode()).hexdigest() for name, text in device_files(self.target).items()},
            **{
                name: hashlib.sha256(data).hexdigest()
                for name, data in template_files(templates_dir(), f"{self.kernel.family.name}.cu.j2").items()
            },
        }
        content = {
            "family": self.kernel.family.name, "params": params, "allow_spill": self.kernel.allow_spill, "target": self.target.name,
            "swept": sorted(axis.path for axis in self.space.axes), "files": files,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_sweep(path: str | os.PathLike[str], target: Target) -> SweepSpec:
    """Read and validate a sweep file.

    Args:
        path: the file.
        target: a GPU target.

    Raises:
        SpecError: with every fault found, those of the base spec included.
    """
    document = read_document(os.fspath(path))
    if document.is_suspect(()):
        raise SpecError(document.faults)
    if document.data.get("kind") != "sweep":
        document.fault(
            ("kind",), f"value {shown(document.data.get('kind'))}, allowed sweep: a spec is swept by a file that names it as base"
        )
        raise SpecError(document.faults)
    file = validate(SweepFile, document, (), written_out(document.data))
    if file is None:
        raise SpecError(document.faults)
    base_path = os.path.join(os.path.dirname(document.file), file.base)
    kernel = _base(document, base_path)
    space = Space(())
    if kernel is not None:
        space = _space(document, file, kernel, target)
    if document.faults or kernel is None:
        raise SpecError(sorted(dict.fromkeys(document.faults), key=lambda fault: fault.line))
    return SweepSpec(file.name, document.file, base_path, kernel, target, space, file.shapes, file.objective, document)


def _base(document: Document, path: str) -> KernelSpec | None:
    try:
        spec = load_spec(path)
    except SpecError as error:
        document.faults.extend(error.faults)
        return None
    if spec.kind != "kernel":
        document.fault(("base",), f"value '{document.data['base']}' is an {spec.kind} spec; allowed: a kernel spec")
        return None
    return spec.kernels[0]


def _space(document: Document, file: SweepFile, kernel: KernelSpec, target: Target) -> Space:
    params = paths_of(kernel.params.model_dump(mode="json"))
    axes = [axis for path, given in file.space.items() if (axis := _axis(document, path, given, params, kernel))]
    fixed = {expression_name(path): value for path, value in params.items() if not isinstance(value, dict | list)}
    fixed |= {f"target.{name}": getattr(target, name) for name in TARGET_FACTS}
    swept = [axis.name for axis in axes]
    for number, axis in enumerate(axes):
        # A condition sees what the base fixes, and the parameters above it: so no two can wait for each other.
        later = set(swept[number:])
        _check_names(document, ("space", axis.path, "when"), axis.when, set(fixed) - later | set(swept[:number]))
    rules = []
    for index, given in enumerate(file.constraints):
        rule = Rule(given.need, given.why)
        _check_names(document, ("constraints", index), rule.need, set(fixed) | set(swept))
        rules.append(rule)
    return Space(tuple(axes), tuple(rules), fixed)


def _axis(document: Document, path: str, given: Values, params: Mapping[str, Any], kernel: KernelSpec) -> Axis | None:
    place: Path = ("space", path)
    if path not in params:
        near = get_close_matches(path, params, 3, 0.5)
        document.fault(
            place, f"no such parameter of the base spec; {'near: ' + ', '.join(near) if near else 'known: ' + ', '.join(params)}"
        )
        return None
    if given.size > MOST_VALUES:
        document.fault(place, f"a range of {given.size:,} values; at most {MOST_VALUES:,} are allowed: give a larger step")
        return None
    values = given.expanded()
    if not values:
        document.fault(place, "has no values; give at least one")
        return None
    plain = [_filled_in(value, path, kernel) for value in values]
    texts = [json.dumps(value, sort_keys=True) for value in plain]
    if twice := next((text for text in texts if texts.count(text) > 1), None):
        document.fault(place, f"has the value {twice} twice")
        return None
    when, otherwise = "", None
    if given.when:
        when = given.when
        otherwise = _filled_in(given.otherwise, path, kernel) if "otherwise" in given.model_fields_set else params[path]
    return Axis(path, tuple(plain), when, otherwise)


def _filled_in(value: Any, path: str, kernel: KernelSpec) -> Any:
    """A value with the defaults of what is left out, as the base spec's own values have them; as it is when it is not valid."""
    if not isinstance(value, dict | list):
        return value
    data = {"kind": "kernel", "family": kernel.family.name}
    *way, last = path.split(".")
    field = fields_at(data, ("params", *way)).get(last)
    try:
        annotation: Any = field.annotation if field else Any
        kind: TypeAdapter[Any] = TypeAdapter(annotation)
        return kind.dump_python(kind.validate_json(json.dumps(value)), mode="json")
    except ValidationError:
        return value


def _check_names(document: Document, place: Path, text: str, known: set[str]) -> None:
    if not text:
        return
    try:
        names = names_in(text)
        if unknown := sorted(names - known):
            near = get_close_matches(unknown[0], known, 3, 0.5)
            guess = f"near: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
            raise ExpressionError(f"unknown name '{unknown[0]}' in '{text}'; {guess}")
        evaluate(text, dict.fromkeys(known, 1))
    except ExpressionError as error:
        # With every name 1 a division by zero, or text where a number stands here, says nothing.
        if "is not" in str(error) or "unknown name" in str(error):
            document.fault(place, str(error))
