"""`ggufmill quantize` writes a model in other types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..formats import PlanError, TensorType
from ..jobs.preflight import preflight
from ..pipeline.job_options import Job
from ..pipeline.write_model import finish, finished_before, protect
from ..quantize.recipes.type_selection import ROLES
from .llama_compat import OutBeforeType, Quantize
from .options import flags
from .options.job import job_options
from .unused_options import refuse_idle

_TARGET, _IMATRIX, _SHOWN = "a target (--target-size, --target-bpw, --max-kld)", "--imatrix", "--dry-run"
_NEEDS = {
    "types": _TARGET,
    "calibration": _TARGET,
    "include_weights": _IMATRIX,
    "exclude_weights": _IMATRIX,
    "hide_imatrix": _IMATRIX,
    "no_timing": _SHOWN,
}


def _role_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--attn-q-type and so on: a type for all tensors of a role that no rule takes."""
    for role, part in reversed(ROLES):
        flag = f"--{role.replace('_', '-')}-type"
        command = click.option(flag, type=flags.TYPE, help=f"Type of tensors with {part} in their name; rules beat it.")(
            command
        )
    return command


@click.command(cls=Quantize, short_help="Quantise a GGUF or a checkpoint by recipe")
@click.argument("source", type=flags.SourceName())
@click.argument("out", type=OutBeforeType(path_type=Path))
@click.argument("type", type=flags.FILE_TYPE, required=False)
@click.option(
    "--recipe", metavar="FILE", help="Recipe of `regex=type` rules (text or TOML), or the name of one that comes along."
)
@click.option(
    "--custom-q", "custom_q", multiple=True, metavar="RULES", help="Rules on the command line: regex=type,regex=type,..."
)
@flags.imatrix
@flags.target_size
@flags.target_bpw
@flags.max_kld
@flags.types
@click.option(
    "--calibration",
    type=flags.FILE,
    help="Text to measure the tensors' sensitivity on, for --target-size and its like.",
)
@click.option("--token-embedding-type", type=flags.TYPE, help="Type of token_embd.weight; beats the rules.")
@click.option("--output-tensor-type", type=flags.TYPE, help="Type of output.weight; beats the rules.")
@click.option("--ffn-gate-inp-type", type=flags.TYPE, help="Type of the routers ffn_gate_inp, which else stay f32.")
@_role_options
@click.option("--pure", is_flag=True, help="Every weight becomes TYPE; mix and rules are left aside.")
@click.option("--leave-output-tensor", is_flag=True, help="Copy output.weight as it is.")
@click.option("--extra-output-tensor", type=flags.TYPE, help="Write a copy of the output matrix of this type beside it.")
@click.option("--prune-layers", metavar="LAYERS", help="Leave these layers out, for example 20,22-25; the others move up.")
@click.option("--include-weights", multiple=True, metavar="TEXT", help="Use imatrix entries with TEXT in their name only.")
@click.option("--exclude-weights", multiple=True, metavar="TEXT", help="Leave imatrix entries with TEXT in their name aside.")
@click.option("--allow-requantize", is_flag=True, help="Allow quantising what is quantised already.")
@click.option("--ignore-imatrix-rules", is_flag=True, help="Allow types that should not be made without an imatrix.")
@click.option("--hide-imatrix", is_flag=True, help="Do not name the imatrix in the file.")
@click.option("--strict", is_flag=True, help="Make every warning an error before any work.")
@flags.allow_nonfinite
@flags.remote
@flags.delete_source_shards
@flags.metadata
@flags.mla_layout
@flags.split_max_size
@flags.split_max_tensors
@flags.tensor_first_split
@flags.keep_split
@flags.partial_requant
@click.option("--no-timing", is_flag=True, help="With --dry-run: do not time this machine's encoders.")
@job_options
def command(
    source: Path | str,
    out: Path,
    type: TensorType | str | None,
    recipe: str | None,
    custom_q: tuple[str, ...],
    imatrix: Path | None,
    target_size: int | None,
    target_bpw: float | None,
    max_kld: float | None,
    types: str | None,
    calibration: Path | None,
    token_embedding_type: TensorType | None,
    output_tensor_type: TensorType | None,
    ffn_gate_inp_type: TensorType | None,
    leave_output_tensor: bool,
    extra_output_tensor: TensorType | None,
    prune_layers: str | None,
    include_weights: tuple[str, ...],
    exclude_weights: tuple[str, ...],
    remote: bool,
    delete_source_shards: bool,
    override_kv: dict[str, Any],
    mla_layout: str | None,
    allow_nonfinite: bool,
    split_max_size: int | None,
    partial_requant: bool,
    no_timing: bool,
    job: Job,
    **options: Any,
) -> None:
    """Quantise SOURCE (a GGUF, a Hugging Face folder or hf:OWNER/NAME: fp8 and bf16 are decoded on the fly) to OUT.

    TYPE is for tensors that no rule takes: a file type such as Q4_K_M or IQ4_K (or its number), which gives some tensors a
    finer type as llama-quantize does, or with --pure a type for all. The first matching rule wins; a rule is searched for
    anywhere in the name. What a TOML recipe says under [quantize] and [convert] counts where the command line does not.

    With --target-size, --target-bpw or --max-kld the types of tensors that no rule takes are searched for, as `ggufmill
    search` does it; the recipe that comes of it is kept in OUT.recipe.txt.

    \b
    Examples:
      ggufmill quantize model-bf16.gguf out.gguf Q4_K_M
      ggufmill quantize DeepSeek-V3/ out.gguf --recipe deepseek-v3-iq4_k_r4.txt --imatrix v3.imatrix --dry-run
      ggufmill quantize Qwen3/ out.gguf iq4_k --custom-q "ffn_down=iq5_k,attn_.*=q8_0"
      ggufmill quantize Qwen3/ out.gguf --target-size 12G --imatrix qwen3.imatrix --calibration calibration.txt
    """
    from ..convert import open_source
    from ..convert.outtype import recipe_types
    from ..jobs.atomic_write import write_text
    from ..pipeline.importance import load_importance
    from ..pipeline.search_options import recipe_target, recipe_wishes
    from ..pipeline.search_result import name_lines
    from ..pipeline.searching import SearchJob
    from ..quantize.planning import plan_quantize
    from ..quantize.prune import drop_layers, parse_layers
    from ..quantize.recipes.recipe import Recipe, load_recipe
    from ..quantize.recipes.rules import parse_rules
    from ..quantize.recipes.type_selection import TypeOverrides
    from ..recipes import find

    path = find(recipe) if recipe is not None else None
    loaded = load_recipe(path) if path is not None else Recipe("", [], "")
    custom, text = parse_rules("\n".join(custom_q), "--custom-q"), loaded.text
    if custom_q:
        text = "\n".join([*custom_q, text]).strip()
    if include_weights and exclude_weights:
        raise PlanError("--include-weights and --exclude-weights exclude each other")
    roles = {role: options.pop(f"{role}_type") for role, _ in ROLES}
    chosen = TypeOverrides(
        token_embedding_type,
        output_tensor_type,
        ffn_gate_inp_type,
        {role: kind for role, kind in roles.items() if kind is not None},
        leave_output_tensor,
        extra_output_tensor,
    )
    layout = mla_layout or loaded.stages.get("convert", {}).get("mla_layout")
    if delete_source_shards and finished_before(source, out, layout, job, type or loaded.type, text):
        return
    is_remote = remote or (job.dry_run and isinstance(source, str))
    opened = open_source(source, mla_layout=layout, remote=is_remote)
    if split_max_size is None and not options["keep_split"]:
        split_max_size = loaded.split_max_size
    importance = None
    if imatrix is not None:
        importance = load_importance(imatrix, opened, quiet=job.as_json, include=include_weights, exclude=exclude_weights)
    if prune_layers is not None:
        opened, former = drop_layers(opened, parse_layers(prune_layers))
        importance = importance.renamed(former) if importance is not None else None
    default, rules = (type, loaded.rules) if type is not None else recipe_types(opened, loaded)
    rules = [*custom, *rules]
    target = recipe_target(loaded, target_size, target_bpw, max_kld)
    refuse_idle(_NEEDS, {_TARGET: target is not None, _IMATRIX: imatrix is not None, _SHOWN: job.dry_run})
    if leave_output_tensor and output_tensor_type is not None:
        raise click.UsageError("--leave-output-tensor copies what --output-tensor-type would make anew: give one of them")
    if (
        default is None
        and not rules
        and target is None
        and chosen == TypeOverrides()
        and not override_kv
        and prune_layers is None
    ):
        raise PlanError("nothing to quantise to: give a TYPE such as Q4_K_M, --recipe, --custom-q or --target-size")
    inputs = [p for p in (path, imatrix) if p is not None]
    if target is not None:
        if default is not None or chosen != TypeOverrides() or options["pure"]:
            raise PlanError("a target leaves no room for a TYPE or types of roles: give rules (--custom-q) for what is fixed")
        folder = path.parent if path is not None else Path()
        wishes = recipe_wishes(loaded, folder, types=types, text=calibration, threads=job.threads)
        recipe_out, state = (out.with_name(out.name + suffix) for suffix in (".recipe.txt", ".state.json"))
        search = SearchJob(
            opened,
            importance,
            wishes,
            fixed=rules,
            fixed_text="\n".join([*custom_q, loaded.rules_text]),
            state=None if job.dry_run else state,
            planning={"override_kv": override_kv, "split_max_size": split_max_size, **options, "strict": False},
        )
        if not job.dry_run:  # what stands in the way is said before anything is measured
            inputs += [p for p in (wishes.text,) if p is not None]
            protect([recipe_out, state], [*opened.files, *inputs])
            least, needed = search.least(target, out), search.most(target)
            again = job.resume and search.state.errors  # the output may be this job's, which is known by its recipe
            preflight(least, force=bool(job.force or again), resume=job.resume, inputs=[*opened.files, *inputs], needed=needed)
        text = search.find(target).text
        rules = parse_rules(text)
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    plan = plan_quantize(
        opened,
        out,
        type=default,
        rules=rules,
        recipe_text=text,
        overrides=chosen,
        importance=importance,
        override_kv=override_kv,
        split_max_size=split_max_size,
        nonfinite_counts=replaced,
        version=__version__,
        **options,
    )
    if target is not None:
        name_lines(plan)
        if not job.dry_run and (job.force or not plan.files[0].path.exists()):
            write_text(out.with_name(out.name + ".recipe.txt"), text)
    finish(
        plan,
        "quantize",
        opened,
        job,
        inputs=inputs,
        replaced=replaced,
        delete_source_shards=delete_source_shards,
        partial_requant=partial_requant,
        timing=not no_timing,
    )
