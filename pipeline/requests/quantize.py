"""What `quantize` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...request_fields import argument, option, request
from ..common.arguments import FileType, TypeName
from .groups import CheckpointOutput, Output, SourceOptions, Splits, TargetOptions, Weighting


@request
class Rules:
    """Which types tensors get, but for those that single options name."""

    recipe: str | Path | None = option(
        "Recipe of `regex=type` rules (text or TOML), or the name of a bundled one.",
        doc="A file of `regex=type` rules (text or TOML), or the name of a bundled one; what a TOML recipe says under "
        "[quantize] and [convert] counts where the arguments say nothing.",
        default=None,
        kind="name",
        metavar="FILE",
        travel="file",
    )
    custom_q: str | Sequence[str] = option(
        "Rules on the command line: regex=type,regex=type,...",
        doc="Rules 'regex=type,regex=type', which come before the recipe's.",
        default=(),
        metavar="RULES",
    )


def _role(part: str) -> TypeName | None:
    return option(f"Type of tensors with {part} in their name; rules beat it.", default=None, kind="type")


@request
class TensorTypes:
    """Types of single tensors and of roles."""

    token_embedding_type: TypeName | None = option("Type of token_embd.weight; beats the rules.", default=None, kind="type")
    output_tensor_type: TypeName | None = option("Type of output.weight; beats the rules.", default=None, kind="type")
    ffn_gate_inp_type: TypeName | None = option(
        "Type of the routers ffn_gate_inp, which otherwise stay f32.", default=None, kind="type"
    )
    attn_v_type: TypeName | None = _role("attn_v.weight")
    attn_qkv_type: TypeName | None = _role("attn_qkv")
    attn_k_type: TypeName | None = _role("attn_k")
    attn_q_type: TypeName | None = _role("attn_q")
    attn_output_type: TypeName | None = _role("attn_output.weight")
    ffn_down_type: TypeName | None = _role("ffn_down")
    ffn_gate_type: TypeName | None = _role("ffn_gate")
    ffn_up_type: TypeName | None = _role("ffn_up")
    pure: bool = option("Every weight becomes TYPE; mix and rules are left aside.", default=False)
    leave_output_tensor: bool = option("Copy output.weight as it is.", default=False)
    extra_output_tensor: TypeName | None = option(
        "Also write a copy of the output matrix, of this type.", default=None, kind="type"
    )


@request
class QuantizeRequest(Rules, Weighting, TargetOptions, TensorTypes, SourceOptions, CheckpointOutput, Splits, Output):
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
        "Text to measure the tensors' sensitivity on, for --target-size and its like.",
        default=None,
        kind="file",
        travel="no",
    )
    prune_layers: str | None = option(
        "Leave these layers out, for example 20,22-25; the others move up.", default=None, metavar="LAYERS"
    )
    include_weights: Sequence[str] = option("Use imatrix entries with TEXT in their name only.", default=(), metavar="TEXT")
    exclude_weights: Sequence[str] = option("Leave imatrix entries with TEXT in their name aside.", default=(), metavar="TEXT")
    allow_requantize: bool = option("Allow quantising what is quantised already.", default=False)
    ignore_imatrix_rules: bool = option("Allow types that should not be made without an imatrix.", default=False)
    hide_imatrix: bool = option("Do not name the imatrix in the file.", default=False)
    strict: bool = option("Make every warning an error before any work.", default=False)
    keep_split: bool = option("Write as many files as the source has, with the same tensors.", default=False, one_of="split")
    only_shards: str | None = option(
        "Write only these files of the split, counted from 1: machines that share nothing divide a job.",
        doc="Numbers of the split's files to write, '1,4,6-9': machines that share nothing divide a job, and each file is as "
        "the whole job writes it; `merge_model` and `hash_model` refuse files of another job.",
        default=None,
        metavar="N-M,...",
    )
    device: str | None = option(
        "Device of torch that encodes k-quants and IQK types: cuda, cuda:1, xpu, mps, cpu, auto; or none.",
        default=None,
        metavar="NAME",
        shown="none",
    )
    no_timing: bool = option("With --dry-run: do not time this machine's encoders.", default=False, travel="no")
