"""A model's configuration: the dimensions of an engine spec, and what a checkpoint says beyond them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kdgen.spec.model import Epsilon, Model, Rope, Strict

#: Hugging Face builds the norms of both latents without the model's epsilon: they have the class's default.
LATENT_NORM_EPS = 1e-6

TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]


class ModelConfig(Strict):
    """A model of the DeepSeek-V3 family.

    Attributes:
        model: dimensions, norms, rotary embedding and quantization, as in an engine spec.
        n_group: runs of experts that a token chooses among first; 1 turns that off.
        topk_group: groups that a token may choose experts from.
        norm_topk_prob: the chosen experts' scores are divided by their sum.
        scoring: from the gate's logits to scores.
        rope_interleave: the checkpoint's rotary values stand in pairs (2 i, 2 i + 1), not in halves (i, i + dim/2).
        stop_token_ids: generation ends after any of these.
        bos_token_id: the token before every text, if there is one.
        tie_word_embeddings: the head is the embedding's table.
        dtype: of all weights that are not quantized.
        prefix: what a wrapper puts before every tensor's name.
        latent_norm_eps: epsilon of q_a_layernorm and kv_a_layernorm.
        predict_layers: layers behind the last that predict further tokens; their tensors may be there and are not used.
    """

    model: Model
    n_group: Annotated[int, Field(ge=1, le=1024)] = 1
    topk_group: Annotated[int, Field(ge=1, le=1024)] = 1
    norm_topk_prob: bool = True
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    rope_interleave: bool = True
    stop_token_ids: tuple[TokenId, ...] = ()
    bos_token_id: TokenId | None = None
    tie_word_embeddings: bool = False
    dtype: Literal["bf16", "f32"] = "bf16"
    prefix: Literal["", "language_model."] = ""
    latent_norm_eps: Epsilon = LATENT_NORM_EPS
    predict_layers: Annotated[int, Field(ge=0, le=16)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        values = {**dict(self.model), **dict(self)}
        if found := [f"{name}: {message}" for name, message in contradictions(values)]:
            raise ValueError("; ".join(found))
        return self

    @classmethod
    def from_hf(cls, path: str | Path, *, latent_norm_eps: float | None = None) -> Self:
        """From `config.json` (and `generation_config.json` beside it, whose stop tokens join).

        Args:
            path: a checkpoint's directory, or its config.json.
            latent_norm_eps: instead of the file's `latent_norm_eps`, a key of kdgen, or 1e-6 where there is none.

        Raises:
            ArtifactError: a file is missing or is no JSON object.
            SpecError: a model that is not supported, unknown keys, contradictions: all of them.
        """
        from kdgen.engine.hf_config import read_directory

        return cls._with_eps(read_directory(Path(path)), latent_norm_eps)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str, *, latent_norm_eps: float | None = None) -> Self:
        """From the contents of a config.json; `where` names their place in messages. Errors as in `from_hf`."""
        from kdgen.engine.hf_config import read

        return cls._with_eps(read(values, where), latent_norm_eps)

    @classmethod
    def _with_eps(cls, values: dict[str, Any], latent_norm_eps: float | None) -> Self:
        return cls(**values) if latent_norm_eps is None else cls(**{**values, "latent_norm_eps": latent_norm_eps})

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json; `from_mapping` gives an equal configuration back."""
        from kdgen.engine.hf_config import write

        return write(self)

    @property
    def q_head_dim(self) -> int:
        """Values of a query's head: those without position, then the rotary ones."""
        return self.model.qk_nope_head_dim + self.model.qk_rope_head_dim

    @property
    def shared_intermediate(self) -> int:
        """Width of the shared experts, which are one MLP; 0 without them."""
        return self.model.shared_experts * self.model.moe_intermediate


def unscaled_rope(theta: float, max_position: int) -> Rope:
    """A rotary embedding without YaRN. The values that mean nothing then are canonical ones, so that equal models are equal."""
    return Rope(theta=theta, factor=1.0, original_max_position=max_position, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What cannot be true together; values that are missing are not looked at.

    Args:
        values: by the names of `Model` and `ModelConfig`.

    Yields:
        (name of a value, what is wrong with it).
    """

    def has(*names: str) -> bool:
        return all(values.get(name) is not None for name in names)

    if has("experts", "experts_per_token") and values["experts_per_token"] > values["experts"]:
        yield "experts_per_token", f"{values['experts_per_token']} of {values['experts']} experts cannot be chosen"
    if has("layers", "dense_layers") and values["dense_layers"] > values["layers"]:
        yield "dense_layers", f"{values['dense_layers']} of {values['layers']} layers cannot be dense"
    if has("experts", "n_group") and values["n_group"] > 0:
        yield from _group_limits(values, values["experts"], values["n_group"])
    if has("vocab"):
        for token in values.get("stop_token_ids", ()):
            if token >= values["vocab"]:
                yield "stop_token_ids", f"token {token} is outside the vocabulary of {values['vocab']}"
        if has("bos_token_id") and values["bos_token_id"] >= values["vocab"]:
            yield "bos_token_id", f"token {values['bos_token_id']} is outside the vocabulary of {values['vocab']}"
    if (quantization := values.get("quantization")) is not None:
        for name in ("hidden", "moe_intermediate"):
            if has(name) and values[name] % quantization.group:
                yield name, f"{values[name]} is no multiple of {quantization.group}, the group of the quantized experts"


def _group_limits(values: Mapping[str, Any], experts: int, groups: int) -> Iterator[tuple[str, str]]:
    if experts % groups:
        yield "n_group", f"{groups} groups do not divide {experts} experts"
        return
    size = experts // groups
    if groups > 1 and size < 2:
        yield "n_group", f"{groups} groups leave {size} expert each; a group's worth is the sum of two"
        return
    if (chosen := values.get("topk_group")) is None:
        return
    if chosen > groups:
        yield "topk_group", f"{chosen} of {groups} groups cannot be chosen"
    elif (count := values.get("experts_per_token")) is not None and size * chosen < count <= experts:
        yield "experts_per_token", f"{count} experts cannot come from {chosen} groups of {size}"
