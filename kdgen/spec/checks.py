"""Rules between the values of an engine spec: slices that must come out even, sizes that must agree."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kdgen.spec.document import Document, Path
from kdgen.spec.fields import default_of

#: What every rank takes an equal slice of.
_SLICED = (
    "model.heads", "model.moe_intermediate", "model.dense_intermediate", "model.vocab",
    "draft.heads", "draft.kv_heads", "draft.intermediate",
)  # fmt: skip


class _UnavailableError(Exception):
    """A value that a rule needs is missing or reported already."""


def check_engine(document: Document) -> None:
    """Report every broken rule at the key that breaks it."""
    for rule in (_slices, _experts, _quantization, _types, _positions, _tree, _drafter, _features):
        rule(_Values(document))


def check_targets(document: Document) -> None:
    """Report targets that are listed twice."""
    targets = document.data.get("targets")
    if isinstance(targets, list):
        for index, name in enumerate(targets):
            if isinstance(name, str) and name in targets[:index]:
                document.fault(("targets", index), f"value '{name}', given twice")


class _Values:
    """The numbers of a spec by dotted name, and faults about them."""

    def __init__(self, document: Document):
        self.document = document

    def find(self, name: str, kind: type | tuple[type, ...] = int) -> Any:
        path: Path = tuple(name.split("."))
        if self.document.is_suspect(path):
            raise _UnavailableError
        value: Any = self.document.data
        for length, part in enumerate(path, 1):
            if not isinstance(value, dict):
                raise _UnavailableError
            value = value[part] if part in value else default_of(self.document.data, path[:length])
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int) or (isinstance(value, int) and value < 0):
            raise _UnavailableError
        return value

    def where(self, name: str) -> str:
        """`ranks = 6 (line 9)`, for a message about another key."""
        path = tuple(name.split("."))
        line = self.document.marks[path].line if path in self.document.marks and path not in self.document.labels else 0
        return f"{name} = {self.find(name, (int, float))}" + (f" (line {line})" if line else "")

    def divisible(self, name: str, by: str) -> None:
        """`name` must be a multiple of `by`."""
        try:
            value, divisor = self.find(name), self.find(by)
            if divisor and value % divisor:
                self.fault(name, f"value {value}, allowed multiples of {self.where(by)}")
        except _UnavailableError:
            return

    def at_most(self, name: str, other: str, less: int = 0) -> None:
        """`name` must not exceed `other - less`."""
        try:
            value, bound = self.find(name), self.find(other) - less
            if value > bound:
                shown = f"{self.where(other)} - {less}" if less else self.where(other)
                self.fault(name, f"value {value}, allowed at most {bound}: {shown}")
        except _UnavailableError:
            return

    def equal(self, name: str, other: str) -> None:
        """`name` must be what `other` is."""
        try:
            value = self.find(name)
            if value != self.find(other):
                self.fault(name, f"value {value}, allowed {self.where(other)}")
        except _UnavailableError:
            return

    def fault(self, name: str, message: str) -> None:
        """Report a broken rule; unlike other faults it does not stop further rules about the same key."""
        before = set(self.document.suspects)
        self.document.fault(tuple(name.split(".")), message)
        self.document.suspects = before


def _slices(values: _Values) -> None:
    """Every rank takes an equal slice of heads, experts' rows, dense rows and vocabulary."""
    values.divisible("draft.heads", "draft.kv_heads")
    try:
        ranks = values.find("ranks")
    except _UnavailableError:
        return
    sliced = {}
    for name in _SLICED:
        with suppress(_UnavailableError):
            sliced[name] = values.find(name)
    uneven = [name for name, value in sliced.items() if ranks and value % ranks]
    if len(uneven) > max(1, len(sliced) // 2):  # the one number they share is the odd one
        values.fault("ranks", f"value {ranks}, allowed divisors of {', '.join(values.where(name) for name in uneven)}")
        return
    for name in uneven:
        values.divisible(name, "ranks")


def _experts(values: _Values) -> None:
    values.at_most("model.experts_per_token", "model.experts")
    values.at_most("model.dense_layers", "model.layers")


def _quantization(values: _Values) -> None:
    """A group of inputs must not straddle two ranks."""
    try:
        group, ranks = values.find("model.quantization.group"), values.find("ranks")
    except _UnavailableError:
        return
    values.divisible("model.hidden", "model.quantization.group")
    try:
        slice_width = values.find("model.moe_intermediate")
        if ranks and group and slice_width % ranks == 0 and slice_width // ranks % group:
            message = f"value {slice_width}, gives each rank {slice_width // ranks} inputs; allowed multiples of {group} per rank"
            values.fault("model.moe_intermediate", f"{message}: {values.where('ranks')}")
    except _UnavailableError:
        return


def _types(values: _Values) -> None:
    """Experts are INT4 exactly when the model says that they are quantized; the cache holds activations."""
    with suppress(_UnavailableError):
        wanted, stored = values.find("types.activations", str), values.find("cache.dtype", str)
        if wanted != stored:
            values.fault("cache.dtype", f"value {stored}, allowed types.activations = {wanted}")
    document = values.document
    if document.is_suspect(("model", "quantization")) or document.is_suspect(("types", "experts")):
        return
    model, types = document.data.get("model"), document.data.get("types") or {}
    if not isinstance(model, dict) or not isinstance(types, dict):
        return
    experts = types.get("experts", default_of(document.data, ("types", "experts")))
    if (experts == "int4") != (model.get("quantization") is not None):
        allowed = "int4: model.quantization is set" if model.get("quantization") is not None else "bf16 or f32: model.quantization is null"
        values.fault("types.experts", f"value {experts}, allowed {allowed}")


def _positions(values: _Values) -> None:
    """Rotary scaling must reach the last position."""
    try:
        last = values.find("model.max_position")
        reach = values.find("model.rope.original_max_position") * values.find("model.rope.factor", (int, float))
        if last > reach:
            origin = f"{values.where('model.rope.original_max_position')} times {values.where('model.rope.factor')}"
            values.fault("model.max_position", f"value {last}, allowed at most {reach:g}: {origin}")
    except _UnavailableError:
        return


def _tree(values: _Values) -> None:
    values.at_most("tree.depth", "draft.block", less=1)
    values.at_most("tree.top_k", "model.vocab")
    values.at_most("tree.width_cap", "tree.top_k")


def _drafter(values: _Values) -> None:
    values.equal("draft.hidden", "model.hidden")  # it shares the model's embedding and head
    values.at_most("draft.mask_token", "model.vocab", less=1)
    try:
        types, layers = values.find("draft.layer_types", list), values.find("draft.layers")
        if len(types) != layers:
            values.fault("draft.layer_types", f"{len(types)} items, allowed {layers}: {values.where('draft.layers')}")
    except _UnavailableError:
        return


def _features(values: _Values) -> None:
    """The layers the drafter reads: ascending, and in the model."""
    try:
        layers, read = values.find("model.layers"), values.find("draft.target_layers", list)
    except _UnavailableError:
        return
    for index, layer in enumerate(read):
        path: Path = ("draft", "target_layers", index)
        if not isinstance(layer, int) or values.document.is_suspect(path):
            continue
        if layer >= layers:
            values.document.fault(path, f"value {layer}, allowed 0…{layers - 1}: {values.where('model.layers')}")
        elif index and isinstance(read[index - 1], int) and layer <= read[index - 1]:
            values.document.fault(path, f"value {layer}, allowed values above the one before it, {read[index - 1]}")
