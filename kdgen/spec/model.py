"""The models of the two kinds of spec file. Families add the models of their parameters (`kdgen.kernels`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kdgen.targets import TARGETS

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
KERNEL_NAME_PATTERN = r"^[a-z][a-z0-9_]*$"


def _known_target(name: str) -> str:
    if name not in TARGETS:
        raise PydanticCustomError("choice", "unknown target")
    return name


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=64, description="name of the spec and of its output directory")]
TargetName = Annotated[str, AfterValidator(_known_target), Field(json_schema_extra={"enum": list(TARGETS)})]
Targets = Annotated[tuple[TargetName, ...], Field(min_length=1, max_length=16, description="what `kdgen build` compiles for by default")]
Dimension = Annotated[int, Field(ge=1, le=1 << 20)]
Epsilon = Annotated[float, Field(gt=0, lt=0.1)]
Description = Annotated[str, Field(max_length=2000, description="free text")]


class Strict(BaseModel):
    """Unknown keys and lossy conversions are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rope(Strict):
    """Rotary embedding with YaRN scaling; the meaning of every value is that of Hugging Face's `rope_scaling`."""

    theta: Annotated[float, Field(gt=1, le=1e9)]
    factor: Annotated[float, Field(ge=1, le=4096)]
    original_max_position: Annotated[int, Field(ge=1, le=1 << 24)]
    beta_fast: Annotated[float, Field(gt=0, le=1024)]
    beta_slow: Annotated[float, Field(gt=0, le=1024)]
    mscale: Annotated[float, Field(ge=0, le=16)]
    mscale_all_dim: Annotated[float, Field(ge=0, le=16)]


class Quantization(Strict):
    """How the routed experts' weights are stored: symmetric integers with one bf16 scale per group of inputs."""

    bits: Literal[4]
    group: Literal[32]


class Model(Strict):
    """Dimensions of a model of the DeepSeek-V3 family; `null` quantization means bf16 experts."""

    hidden: Dimension
    layers: Annotated[int, Field(ge=1, le=1024)]
    heads: Annotated[int, Field(ge=1, le=1024)]
    q_lora_rank: Dimension
    kv_lora_rank: Dimension
    qk_nope_head_dim: Annotated[int, Field(ge=1, le=4096)]
    qk_rope_head_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)]
    v_head_dim: Annotated[int, Field(ge=1, le=4096)]
    experts: Annotated[int, Field(ge=1, le=65536)]
    experts_per_token: Annotated[int, Field(ge=1, le=256)]
    moe_intermediate: Dimension
    shared_experts: Annotated[int, Field(ge=0, le=64)]
    dense_intermediate: Dimension
    dense_layers: Annotated[int, Field(ge=0, le=1024, description="leading layers with a dense MLP instead of experts")]
    vocab: Annotated[int, Field(ge=2, le=1 << 24)]
    max_position: Annotated[int, Field(ge=1, le=1 << 24)]
    rms_norm_eps: Epsilon
    routed_scaling: Annotated[float, Field(gt=0, le=1e4)]
    rope: Rope
    quantization: Quantization | None = None


class Tree(Strict):
    """The draft tree: what `tree_build` builds and one target forward verifies."""

    depth: Annotated[int, Field(ge=1, le=16, description="draft positions L: the deepest node's depth")]
    top_k: Annotated[int, Field(ge=1, le=64, description="candidates K per depth")]
    budget: Annotated[int, Field(ge=0, le=255, description="most nodes beside the root")]
    chain_seed: Annotated[bool, Field(description="emit the chain of rank-0 tokens before the best-first search")] = False
    depth_bonus: Annotated[float, Field(ge=0.0, le=4.0, description="added to a score for every depth beyond the first")] = 0.0
    width_cap: Annotated[int, Field(ge=0, le=64, description="use only this many ranks per depth; 0 uses all")] = 0
    pad: Annotated[bool, Field(description="fill up with unused depth-1 tokens to the budget")] = False


class Draft(Strict):
    """The DFlash block-diffusion drafter: a small dense GQA model that fills a block of masked positions at once."""

    block: Annotated[int, Field(ge=2, le=64, description="positions of a block: the known token and the drafts")]
    layers: Annotated[int, Field(ge=1, le=64)]
    hidden: Dimension
    intermediate: Dimension
    heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    rms_norm_eps: Epsilon
    mask_token: Annotated[int, Field(ge=0, le=1 << 24)]
    target_layers: Annotated[
        tuple[Annotated[int, Field(ge=0, le=1024)], ...],
        Field(min_length=1, max_length=64, description="target layers whose outputs the drafter reads, ascending"),
    ]
    layer_types: Annotated[
        tuple[Literal["sliding", "full"], ...], Field(min_length=1, max_length=64, description="attention of every layer")
    ]
    sliding_window: Annotated[int, Field(ge=1, le=1 << 24, description="keys a `sliding` layer sees")]
    rope: Rope


class Cache(Strict):
    """The paged cache of latents and rotary keys."""

    page_size: Annotated[int, Field(ge=1, le=4096, description="positions per page")]
    max_sequences: Annotated[int, Field(ge=1, le=4096, description="sequences decoded together at most")]
    dtype: Literal["bf16", "f32"] = "bf16"


class Types(Strict):
    """Types of values on their way through the model; accumulation and the residual stream are always f32."""

    activations: Annotated[Literal["bf16", "f32"], Field(description="of activations, latents and logits' inputs")] = "bf16"
    weights: Annotated[Literal["bf16", "f32"], Field(description="of all weights but the routed experts'")] = "bf16"
    experts: Annotated[Literal["int4", "bf16", "f32"], Field(description="of the routed experts' weights")] = "int4"


class KernelEntry(Strict):
    """One kernel of an engine spec; `params` is checked by the family's own model."""

    family: Annotated[str, Field(max_length=64, description="kernel family")]
    params: Annotated[dict[str, Any], Field(description="the family's parameters")] = {}
    allow_spill: Annotated[bool, Field(description="accept a kernel that spills registers to memory")] = False


#: Of both kinds of file; `kdgen.spec.base` takes it out before a file is validated.
Base = Annotated[
    str | None, Field(max_length=1000, description="spec file, from this file's directory, whose values this one inherits and replaces")
]


class KernelFile(KernelEntry):
    """A kernel spec: one kernel."""

    base: Base = None
    kind: Literal["kernel"]
    name: Name
    description: Description = ""
    targets: Targets


class EngineSpec(Strict):
    """What an engine spec says beside its kernels."""

    description: Description = ""
    model: Model
    ranks: Annotated[int, Field(ge=1, le=1024, description="GPUs the model is sliced over (tensor parallel)")]
    tree: Tree
    draft: Draft
    cache: Cache
    types: Types = Types()


class EngineFile(EngineSpec):
    """An engine spec: a model, how it is decoded, and its kernels."""

    base: Base = None
    kind: Literal["engine"]
    name: Name
    targets: Targets
    kernels: Annotated[
        dict[Annotated[str, Field(pattern=KERNEL_NAME_PATTERN, max_length=64)], KernelEntry],
        Field(max_length=512, description="kernels by name"),
    ]


FILES: dict[str, type[KernelFile] | type[EngineFile]] = {"kernel": KernelFile, "engine": EngineFile}
#: Keys that name things or choose models: they are read as written, an expression means nothing there.
PLAIN_KEYS = frozenset({"kind", "base", "name", "description", "family", "targets"})
