"""`kdgen bundle` and `kdgen decode`: make a toy model with golden results, and decode with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdgen.cli import EXIT_DIFFERENT
from kdgen.cli.build import SetOption, SpecPath
from kdgen.cli.output import make_console, make_progress, print_json

if TYPE_CHECKING:
    from kdgen.build.report import Progress
    from kdgen.engine.checkpoint import Checkpoint
    from kdgen.engine.config import ModelConfig
    from kdgen.engine.draft import Drafter
    from kdgen.engine.engine import Engine, Loop, Mode
    from kdgen.engine.state import Request
    from kdgen.runtime.device import Device
    from kdgen.spec import Spec


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
    loop: Annotated[str, typer.Option("--loop", metavar="LOOP", help="host, or device: one graph launch, no logits kept.")] = "host",
    against: Annotated[str, typer.Option("--against", metavar="MODE", help="Decode in this mode as well, and compare.")] = "",
    draw: Annotated[bool, typer.Option("--draw", help="Draw the tree of the first prompt's first round.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Time by stage and distinct experts, kernel by kernel; slower.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Look for NaN and infinity after every kernel; slow.")] = False,
    compare: Annotated[
        str, typer.Option("--compare", metavar="ref", help="Decode nothing: find the first stage that departs from the numpy engine.")
    ] = "",
    overrides: SetOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where built kernels are kept.")] = Path("generated"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Decode greedily: one token at a time, by the drafter's chain, or by its tree.

    Of a bundle, the result is compared with the golden one; leaves with 3 when it, or what --against or --compare look at, differs.

    Example: kdgen decode toy.kdtr --mode tree --draft oracle:0.9 --device host
    """
    from dataclasses import replace

    from kdgen.cli.decode_result import against_golden, against_mode, document_of, show, timing_of
    from kdgen.engine.draft import Oracle, parse_drafter
    from kdgen.engine.engine import Engine
    from kdgen.engine.model_file import open_model, spec_for
    from kdgen.engine.observe import Stopwatch, observers
    from kdgen.engine.state import Request
    from kdgen.engine.traps import trap
    from kdgen.runtime import open_device

    way, other, looping = _mode(mode, "--mode"), _mode(against, "--against") if against else None, _loop(loop, observed=check or timing)
    _refuse_wrong(draw and way == "ar", "--draw: mode ar drafts nothing, so there is no tree; allowed are chain and tree")
    _refuse_wrong(compare not in ("", "ref"), f"--compare {compare}: allowed is ref, the numpy engine")
    drafter: Drafter = parse_drafter(draft)
    opened = open_model(model)
    with opened.checkpoint as checkpoint:
        golden, config = opened.golden, checkpoint.config
        prompts = _prompts(prompt_ids) if prompt_ids else [golden.prompt] if golden else []
        _check_prompts(prompts, config)
        own = golden if golden and prompts == [golden.prompt] else None
        count = max_tokens or (len(golden.tokens) if golden else 32)
        stops = config.stop_token_ids if stop and own is None else ()
        chosen = spec_for(config, spec, tuple(overrides or ()), name=opened.spec, activations=opened.activations)
        assert chosen.engine is not None
        longest = max(len(prompt) for prompt in prompts) + count + chosen.engine.tree.budget + 1
        where = open_device(device)
        _build(chosen, where, out, None if json else make_progress())
        engine = Engine.open(chosen, checkpoint, where, out=out, context=longest)
        if compare:
            raise typer.Exit(_compare(engine, checkpoint, prompts[0], json))
        requests = [Request(prompt, count) for prompt in prompts]
        options: dict[str, Any] = {"budget": budget, "stop_tokens": stops, "loop": looping, "record": looping == "host"}
        if isinstance(drafter, Oracle) and {way, other} - {"ar", None}:
            drafter = replace(drafter, truth=_truth(engine, requests, stops))
        watch = Stopwatch(engine.device, sum(-(-len(prompt) // engine.chunk_rows) for prompt in prompts))
        engine.observer = observers([*([watch] if timing else ()), *([trap] if check else ())])
        generation = engine.generate(requests, mode=way, drafter=drafter, **options)
        engine.observer = None
        document: dict[str, Any] = {
            "spec": chosen.name,
            "device": engine.device.name,
            "mode": mode,
            "draft": draft if mode != "ar" else None,
            "loop": loop,
        }
        document |= document_of(generation)
        if own:
            document["golden"] = against_golden(generation, own, chosen.engine.types.activations)
        if other:
            document["against"] = against_mode(generation, engine.generate(requests, mode=other, drafter=drafter, **options), other)
        if timing:
            document["timing"] = timing_of(watch)
        tree = None
        if draw:
            from kdgen.engine.first_round import first_tree

            tree = first_tree(engine, prompts[0], way, budget, drafter, generation.results[0].tokens)
    if json:
        print_json(document | ({"first_tree": _plain(tree)} if draw else {}))
    else:
        show(document)
        if draw:
            _draw(tree)
    if not all(document[name]["equal"] for name in ("golden", "against") if name in document):
        raise typer.Exit(EXIT_DIFFERENT)


def _refuse_wrong(wrong: bool, message: str) -> None:
    from kdgen.errors import UsageError

    if wrong:
        raise UsageError(message)


def _mode(text: str, option: str) -> Mode:
    from kdgen.engine.engine import MODES

    _refuse_wrong(text not in MODES, f"{option} {text}: allowed are {', '.join(MODES)}")
    return next(mode for mode in MODES if mode == text)


def _loop(text: str, *, observed: bool) -> Loop:
    _refuse_wrong(text not in ("host", "device"), f"--loop {text}: allowed are host, device")
    _refuse_wrong(text == "device" and observed, "--loop device: not with --check or --timing, which look at every kernel from the host")
    return "device" if text == "device" else "host"


def _prompts(text: str) -> list[tuple[int, ...]]:
    from kdgen.errors import UsageError

    try:
        return [tuple(int(token) for token in prompt.split(",")) for prompt in text.split("/")]
    except ValueError as error:
        raise UsageError(f"--prompt-ids {text}: give token ids as 1,2,3, several prompts as 1,2/3,4") from error


def _check_prompts(prompts: list[tuple[int, ...]], config: ModelConfig) -> None:
    """Before anything is built or read: every prompt that the model cannot take."""
    model = config.model
    _refuse_wrong(not prompts, "no prompt: give --prompt-ids 1,2,3")
    wrong = []
    for number, prompt in enumerate(prompts):
        if outside := [token for token in prompt if not 0 <= token < model.vocab]:
            wrong.append(f"prompt {number}: token {outside[0]} is outside the vocabulary, 0 … {model.vocab - 1}")
        if len(prompt) > model.max_position:
            wrong.append(f"prompt {number}: {len(prompt)} tokens are more than the model's {model.max_position} positions")
    _refuse_wrong(bool(wrong), "--prompt-ids: " + "; ".join(wrong))


def _build(spec: Spec, device: Device, out: Path, progress: Progress | None) -> None:
    """Build the kernels unless they are, with progress: it may take a minute."""
    from kdgen.build import build_spec
    from kdgen.targets import get_target
    from kdgen.verify.artifacts import is_current

    target = get_target(device.target_names[0])
    if not is_current(out / spec.name / target.name, spec, target):
        build_spec(spec, [target], out, progress=progress)


def _truth(engine: Engine, requests: list[Request], stops: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """What an oracle knows: the plain continuations. Found here once, before anything is timed or watched."""
    plain = engine.generate(requests, mode="ar", stop_tokens=stops)
    return tuple((*request.prompt, *result.tokens) for request, result in zip(requests, plain.results, strict=True))


def _plain(tree: Any) -> Any:
    from dataclasses import asdict

    return None if tree is None else asdict(tree)


def _draw(tree: Any) -> None:
    import sys

    from kdgen.cli.draw_tree import tree_lines
    from kdgen.verify.show_tree import ASCII, UNICODE

    if tree is None:
        print("no tree: the generation ended with its first token, which follows from the prompt alone")
        return
    console = make_console()
    for line in tree_lines(tree, UNICODE if sys.stdout.isatty() else ASCII):
        console.print(line)


def _compare(engine: Engine, checkpoint: Checkpoint, prompt: tuple[int, ...], json: bool) -> int:
    from kdgen.engine.compare import compare_stages

    found = compare_stages(engine, checkpoint, prompt)
    if json:
        from dataclasses import asdict
        from math import isfinite

        # JSON has no NaN: what is not finite departs, and has no error.
        stages = [asdict(s) | {"error": s.error if isfinite(s.error) else None, "departs": s.departs} for s in found.stages]
        first = found.departs
        print_json({"stages": stages, "departs": None if first is None else {"layer": first.layer, "stage": first.stage}})
    else:
        for stage in found.stages:
            print(stage)
        if found.departs is None:
            print(f"all {len(found.stages)} stages agree with the numpy engine")
        else:
            print(f"first departs: {found.departs.where}")
    return EXIT_DIFFERENT if found.departs else 0
