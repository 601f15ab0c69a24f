"""What `kdgen decode` says: one document, as JSON or as text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kdgen.engine.bundle import Golden
    from kdgen.engine.engine import Generation
    from kdgen.engine.observe import Stopwatch

#: Largest difference of a logit from the golden one, by type of the activations. Roundings of bf16 that fall to the other side move it.
LOGIT_BOUNDS = {"f32": 1e-5, "bf16": 0.15}


def document_of(generation: Generation) -> dict[str, Any]:
    """Tokens, hashes of the logits, forwards, times; those of the first sequence also at the top."""
    sequences = []
    for result in generation.results:
        digest = None if result.logits is None else hashlib.sha256(np.ascontiguousarray(result.logits).tobytes()).hexdigest()
        sequences.append({"tokens": list(result.tokens), "logits_sha256": digest, "accepted": list(result.accepted)})
    decoded = sum(len(result.tokens) - 1 for result in generation.results)
    return {
        "tokens": sequences[0]["tokens"], "logits_sha256": sequences[0]["logits_sha256"],
        "forwards": generation.forwards, "prompt_forwards": generation.prompt_forwards,
        "acceptance_length": generation.acceptance_length,
        "prompt_ms": generation.prompt_seconds * 1e3, "decode_ms": generation.decode_seconds * 1e3,
        "ms_per_token": generation.decode_seconds * 1e3 / max(1, decoded),
        "sequences": sequences,
    }  # fmt: skip


def against_golden(generation: Generation, golden: Golden, activations: str) -> dict[str, Any]:
    """The first sequence beside the golden one.

    Tokens must be equal with float32 activations. With bf16 ones the first that differs must be one between two logits that are nearer than
    twice the bound; behind it the text is another.
    """
    result, bound = generation.results[0], LOGIT_BOUNDS[activations]
    count = min(len(result.tokens), len(golden.tokens))
    equal = sum(a == b for a, b in zip(result.tokens, golden.tokens, strict=False))
    same = next((i for i in range(count) if result.tokens[i] != golden.tokens[i]), count)
    found: dict[str, Any] = {"tokens_equal": equal, "tokens": count, "max_logit_difference": None, "bound": bound}
    ok = equal == count
    if same < count:
        found["first_difference"] = same
        found["gap"] = float(golden.logits[same].max() - golden.logits[same, result.tokens[same]])
        ok = activations == "bf16" and found["gap"] <= 2 * bound
    if result.logits is not None:
        rows = min(count, same + 1)
        found["max_logit_difference"] = float(np.abs(result.logits[:rows] - golden.logits[:rows]).max())
        ok = ok and found["max_logit_difference"] <= bound
    return found | {"equal": ok}


def against_mode(generation: Generation, other: Generation, mode: str) -> dict[str, Any]:
    """The same requests decoded in another mode: whether tokens, and all bits of the logits, are equal."""
    pairs = list(zip(generation.results, other.results, strict=True))
    tokens = all(a.tokens == b.tokens for a, b in pairs)
    logits = None
    if all(a.logits is not None and b.logits is not None for a, b in pairs):
        logits = all(a.logits is not None and b.logits is not None and a.logits.tobytes() == b.logits.tobytes() for a, b in pairs)
    return {
        "mode": mode, "tokens_equal": tokens, "logits_equal": logits, "forwards": other.forwards,
        "ms_per_token": document_of(other)["ms_per_token"], "equal": tokens and logits is not False,
    }  # fmt: skip


def timing_of(watch: Stopwatch) -> dict[str, Any]:
    """Milliseconds by stage over all counted forwards, the longest first, and distinct experts by layer."""
    stages = sorted(watch.milliseconds.items(), key=lambda item: -item[1])
    experts = {str(layer): {"mean": float(np.mean(counts)), "max": max(counts)} for layer, counts in sorted(watch.experts.items())}
    return {"forwards": watch.forwards, "stage_ms": dict(stages), "experts": experts}


def show(document: dict[str, Any]) -> None:
    """The document as text."""
    for sequence in document["sequences"]:
        print(" ".join(str(token) for token in sequence["tokens"]))
        logits = f"logits {sequence['logits_sha256'][:16]}, " if sequence["logits_sha256"] else ""
        print(f"  {logits}accepted per verification: {' '.join(map(str, sequence['accepted'])) or 'none'}")
    print(
        f"{document['mode']} on {document['device']}: {document['forwards']} target forwards after {document['prompt_forwards']} over "
        f"the prompt, acceptance length {document['acceptance_length']:.2f}, {document['ms_per_token']:.2f} ms per token"
    )
    if golden := document.get("golden"):
        difference = golden["max_logit_difference"]
        line = f"golden: {golden['tokens_equal']} of {golden['tokens']} tokens equal"
        if difference is not None:
            line += f", largest difference of a logit {difference:.1e} (bound {golden['bound']:g})"
        if "gap" in golden:
            line += f"; token {golden['first_difference']} differs, where the golden logits of the two are {golden['gap']:.1e} apart"
        print(line if golden["equal"] else f"{line}: DIFFERENT")
    if against := document.get("against"):
        logits = {None: "logits not kept", True: "the same bits of the logits", False: "OTHER LOGITS"}[against["logits_equal"]]
        print(
            f"against {against['mode']}: {'the same tokens' if against['tokens_equal'] else 'OTHER TOKENS'}, {logits}; "
            f"{against['forwards']} target forwards, {against['ms_per_token']:.2f} ms per token"
        )
    if timing := document.get("timing"):
        _show_timing(timing)


def _show_timing(timing: dict[str, Any]) -> None:
    from kdgen.cli.output import print_table

    total, forwards = sum(timing["stage_ms"].values()), max(1, timing["forwards"])
    rows = [(name, f"{ms:.2f}", f"{ms / forwards:.3f}", f"{ms / total:.1%}" if total else "") for name, ms in timing["stage_ms"].items()]
    title = f"time by stage, kernel by kernel, {timing['forwards']} forwards after the prompt:"
    print_table(title, ("stage", "ms", "per forward", "share"), rows, right=("ms", "per forward", "share"))
    if timing["experts"]:
        spread = [(layer, f"{counts['mean']:.1f}", str(counts["max"])) for layer, counts in timing["experts"].items()]
        print_table("distinct experts of a forward:", ("layer", "mean", "most"), spread, right=("layer", "mean", "most"))
