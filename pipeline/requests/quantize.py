"""What `quantize` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ...request_fields import argument, option, request
from ..common.arguments import FileType, TypeName
from .groups import CheckpointOutput, OutputOptions, SourceOptions, Splits, TargetOptions, Weighting


@request
class Rules:
    """Which types tensors get, but for those that single options name."""

    section: ClassVar[str] = "Types of tensors"

    recipe: str | Path | None = option(
        "Follow this recipe of `regex=type` rules (text or TOML): a file, or the name of a bundled one.",
        doc="A file of `regex=type` rules (text or TOML), or the name of a bundled one; what a TOML recipe says under "
        "[quantize] and [convert] counts where the arguments say nothing.",
        default=None,
        kind="name",
        metavar="FILE",
        travel="file",
    )
    custom_q: str | Sequence[str] = option(
        "Follow these rules first: regex=type,regex=type,...",
        doc="Rules 'regex=type,regex=type', which come before the recipe's.",
        default=(),
        metavar="RULES",
    )


def _role(part: str) -> TypeName | None:
    return option(f"Give tensors with {part} in their name this type; rules beat it.", default=None, kind="type", rare=True)


@request
class TensorTypes:
    """Types of single tensors and of roles."""

    section: ClassVar[str] = "Types of tensors"

    token_embedding_type: TypeName | None = option(
        "Give token_embd.weight this type, whatever the rules say.", default=None, kind="type"
    )
    output_tensor_type: TypeName | None = option(
        "Give output.weight this type, whatever the rules say.", default=None, kind="type"
    )
    ffn_gate_inp_type: TypeName | None = option(
        "Give the routers ffn_gate_inp this type; otherwise they stay f32.", default=None, kind="type", rare=True
    )
    attn_v_type: TypeName | None = _role("attn_v.weight")
    attn_qkv_type: TypeName | None = _role("attn_qkv")
    attn_k_type: TypeName | None = _role("attn_k")
    attn_q_type: TypeName | None = _role("attn_q")
    attn_output_type: TypeName | None = _role("attn_output.weight")
    ffn_down_type: TypeName | None = _role("ffn_down")
    ffn_gate_type: TypeName | None = _role("ffn_gate")
    ffn_up_type: TypeName | None = _role("ffn_up")
    pure: bool = option("Give every weight TYPE; the stock mix and rules do not apply.", default=False)
    leave_output_tensor: bool = option("Copy output.weight without changing its type.", default=False, rare=True)
    extra_output_tensor: TypeName | None = option(
        "Write a copy of the output matrix too, of this type.", default=None, kind="type", rare=True
    )


@request
class QuantizeRequest(Rules, Weighting, TargetOptions, TensorTypes, SourceOptions, CheckpointOutput, Splits, OutputOptions):
    source: str | Path = argument(
        "A GGUF file, a checkpoint's folder or hf:OWNER/NAME; fp8 and bf16 are decoded on the fly.",
        kind="source",
        travel="path",
        kw_only=False,
    )
    out: str | Path = argument("The file to write.", kind="out", travel="path", kw_only=False)
    type: FileType | None = argument(
        "For tensors that no rule takes: a file type such as 'Q4_K_M', which gives some tensors a finer type as llama-quantize "
        "does, or a tensor type such as 'iq4_k'.",
        default=None,
        kind="file_type",
        key="quantize.type",
        kw_only=False,
    )
    calibration: str | Path | None = option(
        "Measure the tensors' sensitivity on this text, or on `bundled`, for --target-size, --target-bpw and --max-kld.",
        default=None,
        kind="calibration_text",
        travel="no",
        section="Search for types",
    )
    prune_layers: str | None = option(
        "Leave these layers out, for example 20,22-25; the later ones are renumbered.",
        default=None,
        metavar="LAYERS",
        rare=True,
        section="Source",
    )
    include_weights: Sequence[str] = option(
        "Use only imatrix entries with TEXT in their name.",
        default=(),
        metavar="TEXT",
        rare=True,
        section="Importance of weights",
    )
    exclude_weights: Sequence[str] = option(
        "Ignore imatrix entries with TEXT in their name.",
        default=(),
        metavar="TEXT",
        rare=True,
        section="Importance of weights",
    )
    sequential: str | Path | None = option(
        "Encode matrices in the order of the model, each for the inputs that the matrices before it, already quantised, "
        "produce from this text. This needs torch, and --covariance or --curvature.",
        default=None,
        kind="calibration_text",
        key="quantize.sequential",
        travel="file",
        section="Importance of weights",
    )
    sequential_chunks: int | None = option(
        "Read this many windows of that text.",
        default=None,
        least=1,
        shown="128",
        key="quantize.sequential_chunks",
        rare=True,
        section="Importance of weights",
    )
    tune: bool = option(
        "Tune norms and scales of what was written to the source's predictions, at the end of --effort 4 or --sequential.",
        default=False,
        key="quantize.tune",
        rare=True,
        section="Importance of weights",
    )
    allow_requantize: bool = option(
        "Allow tensors that are quantised already to be quantised again.", default=False, section="Types of tensors"
    )
    ignore_imatrix_rules: bool = option(
        "Allow types that should not be made without an imatrix.", default=False, rare=True, section="Importance of weights"
    )
    hide_imatrix: bool = option(
        "Leave the name of the imatrix out of the file.", default=False, rare=True, section="Importance of weights"
    )
    strict: bool = option("Make every warning an error before any work.", default=False, section="Output")
    keep_split: bool = option(
        "Write as many files as the source has, with the same tensors.",
        default=False,
        one_of="split",
        rare=True,
        section="Output",
    )
    only_shards: str | None = option(
        "Write only these files of the split, counted from 1, so that machines without a common disk can divide a job.",
        doc="Numbers of the split's files to write, '1,4,6-9': machines that share nothing divide a job, and each file is as "
        "the whole job writes it; `merge_model` and `hash_model` refuse files of another job.",
        default=None,
        metavar="N-M,...",
        rare=True,
        section="Output",
    )
    device: str | None = option(
        "Encode on this GPU (cuda, cuda:1), the same bytes; codes under a covariance also on xpu, mps, cpu; or auto, none.",
        default=None,
        metavar="NAME",
        shown="none",
        section="Devices",
    )
    no_timing: bool = option(
        "Measure no speed of this machine's encoders in --dry-run, and forecast no time.",
        default=False,
        travel="no",
        rare=True,
        section="Output",
    )
