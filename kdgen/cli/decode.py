"""`kdgen bundle` and `kdgen decode`: make a toy model with golden results, and decode with a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdgen.cli import EXIT_DIFFERENT
from kdgen.cli.build import SetOption, SpecPath
from kdgen.cli.output import print_json

if TYPE_CHECKING:
    from kdgen.engine.bundle import Golden
    from kdgen.engine.engine import Generation

#: Largest difference of a logit from the golden one, f32 activations; of bf16 ones only tokens are compared.
LOGIT_BOUND = 1e-5


def bundle(
    spec: SpecPath,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to make, such as toy.kdtr.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and prompt.")] = 0,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 12,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Golden tokens.")] = 24,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Keep the weights, or make them again from the seed.")] = True,
    overrides: SetOption = None,
) -> None:
    """Make a random model of an engine spec, with a prompt and what the numpy engine makes of it; the same bytes for the same seed.

    Example: kdgen bundle specs/engines/tiny-narrow-int4.yaml -o toy.kdtr
    """
    from kdgen.engine.bundle import write_bundle
    from kdgen.spec import load_spec

    write_bundle(output, load_spec(str(spec), overrides or ()), seed=seed, prompt=prompt, tokens=tokens, weights=weights)
    print(f"{output}: {output.stat().st_size:,} bytes")


def decode(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A bundle, a KDTR model, or a directory with config.json.")],
    *,
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="FILE", help="The engine spec; by default one that fits the model.")
    ] = None,
    prompt_ids: Annotated[
        str,
        typer.Option(
            "--prompt-ids", metavar="IDS", help="Token ids, as 1,2,3; several prompts as 1,2/3,4. Of a bundle, its own by default."
        ),
    ] = "",
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="ar, chain or tree: equal tokens, equal bits.")] = "tree",
    budget: Annotated[int | None, typer.Option("--budget", min=0, help="Nodes of a tree beside the root.")] = None,
    draft: Annotated[str, typer.Option("--draft", metavar="DRAFTER", help="ngram, or oracle[:RATE[,RATE…][@RANK[,RANK…]]].")] = "ngram",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=0, help="New tokens at most; 0: as many as are golden, else 32.")] = 0,
    stop: Annotated[bool, typer.Option("--stop/--no-stop", help="End after the model's stop tokens.")] = True,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="host, cuda, cuda:N, or auto.")] = "auto",
    check: Annotated[bool, typer.Option("--check", help="Look for NaN and infinity after every kernel; slow.")] = False,
    compare: Annotated[str, typer.Option("--compare", metavar="ref", help="Find the first stage that departs from the numpy engine.")] = "",
    overrides: SetOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where built kernels are kept.")] = Path("generated"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Decode greedily: one token at a time, by the drafter's chain, or by its tree.

    Of a bundle, the result is compared with the golden one; leaves with 3 when it differs.

    Example: kdgen decode toy.kdtr --mode tree --draft oracle:0.9 --device host
    """
    from kdgen.engine.draft import parse_drafter
    from kdgen.engine.engine import MODES, Engine
    from kdgen.engine.model_file import open_model, spec_for
    from kdgen.engine.state import Request
    from kdgen.errors import UsageError
    from kdgen.runtime import open_device

    if mode not in MODES:
        raise UsageError(f"--mode {mode}: allowed are {', '.join(MODES)}")
    if compare not in ("", "ref"):
        raise UsageError(f"--compare {compare}: allowed is ref, the numpy engine")
    drafter = parse_drafter(draft)
    checkpoint, golden = open_model(model)
    with checkpoint:
        config = checkpoint.config
        prompts = _prompts(prompt_ids) if prompt_ids else [golden.prompt] if golden else []
        if not prompts:
            raise UsageError("no prompt: give --prompt-ids 1,2,3")
        count = max_tokens or (len(golden.tokens) if golden else 32)
        stops = config.stop_token_ids if stop and golden is None else ()
        chosen = spec_for(config, spec, tuple(overrides or ()))
        longest = max(len(prompt) for prompt in prompts) + count + chosen.engine.tree.budget + 1 if chosen.engine else None
        engine = Engine.open(chosen, checkpoint, open_device(device), out=out, context=longest)
        if compare:
            raise typer.Exit(_compare(engine, checkpoint, prompts[0]))
        if check:
            from kdgen.engine.traps import trap

            engine.observer = trap
        requests = [Request(prompt, count) for prompt in prompts]
        generation = engine.generate(requests, mode=mode, budget=budget, drafter=drafter, stop_tokens=stops, record=True)
    own = golden if golden and prompts == [golden.prompt] else None
    document = _document(generation, mode, draft, engine.device.name, chosen.name, own)
    if json:
        print_json(document)
    else:
        _show(document)
    if own and not document["golden"]["equal"]:
        raise typer.Exit(EXIT_DIFFERENT)


def _prompts(text: str) -> list[tuple[int, ...]]:
    from kdgen.errors import UsageError

    try:
        return [tuple(int(token) for token in prompt.split(",")) for prompt in text.split("/")]
    except ValueError as error:
        raise UsageError(f"--prompt-ids {text}: give token ids as 1,2,3, several prompts as 1,2/3,4") from error


def _document(generation: Generation, mode: str, draft: str, device: str, spec: str, golden: Golden | None) -> dict[str, Any]:
    import numpy as np

    sequences = []
    for result in generation.results:
        assert result.logits is not None
        digest = hashlib.sha256(np.ascontiguousarray(result.logits).tobytes()).hexdigest()
        sequences.append({"tokens": list(result.tokens), "logits_sha256": digest, "accepted": list(result.accepted)})
    decoded = sum(len(result.tokens) - 1 for result in generation.results)
    document: dict[str, Any] = {
        "spec": spec, "device": device, "mode": mode, "draft": draft if mode != "ar" else None,
        "tokens": sequences[0]["tokens"], "logits_sha256": sequences[0]["logits_sha256"],
        "forwards": generation.forwards, "prompt_forwards": generation.prompt_forwards,
        "acceptance_length": generation.acceptance_length,
        "prompt_ms": generation.prompt_seconds * 1e3, "decode_ms": generation.decode_seconds * 1e3,
        "ms_per_token": generation.decode_seconds * 1e3 / max(1, decoded),
        "sequences": sequences,
    }  # fmt: skip
    if golden:
        result = generation.results[0]
        assert result.logits is not None
        count = min(len(result.tokens), len(golden.tokens))
        equal = sum(a == b for a, b in zip(result.tokens, golden.tokens, strict=False))
        # Behind the first token that differs, logits are those of another text.
        same = next((i for i in range(count) if result.tokens[i] != golden.tokens[i]), count)
        rows = min(count, same + 1)
        worst = float(np.abs(result.logits[:rows] - golden.logits[:rows]).max())
        ok = equal == count and worst <= LOGIT_BOUND
        document["golden"] = {"tokens_equal": equal, "tokens": count, "max_logit_difference": worst, "bound": LOGIT_BOUND, "equal": ok}
    return document


def _show(document: dict[str, Any]) -> None:
    for sequence in document["sequences"]:
        print(" ".join(str(token) for token in sequence["tokens"]))
        print(f"  logits {sequence['logits_sha256'][:16]}, accepted per verification: {' '.join(map(str, sequence['accepted']))}")
    print(
        f"{document['mode']} on {document['device']}: {document['forwards']} target forwards after {document['prompt_forwards']} over "
        f"the prompt, acceptance length {document['acceptance_length']:.2f}, {document['ms_per_token']:.2f} ms per token"
    )
    if golden := document.get("golden"):
        print(
            f"golden: {golden['tokens_equal']} of {golden['tokens']} tokens equal, largest difference of a logit "
            f"{golden['max_logit_difference']:.1e} (bound {golden['bound']:.0e})"
        )


def _compare(engine: Any, checkpoint: Any, prompt: tuple[int, ...]) -> int:
    from kdgen.engine.compare import compare_stages

    found = compare_stages(engine, checkpoint, prompt)
    for line in found.lines:
        print(line)
    return EXIT_DIFFERENT if found.departs else 0
