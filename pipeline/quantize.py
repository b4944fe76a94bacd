"""`ggufmill quantize`: a model is written in other types, by a recipe, a file type, or to a target size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..convert import open_source
from ..convert.hub.fetch import is_repository
from ..convert.outtype import recipe_types
from ..errors import PlanError, UsageError
from ..jobs.atomic_write import write_text
from ..jobs.preflight import preflight
from ..jobs.shards import parse_shards
from ..quantize.planning import plan_quantize
from ..quantize.prune import drop_layers, parse_layers
from ..quantize.recipes.recipe import Recipe, load_recipe
from ..quantize.recipes.rules import Rule, parse_rules
from ..quantize.recipes.type_selection import TypeOverrides
from ..recipes import find
from ..version import __version__
from .cluster.call import cluster_call
from .cluster.measuring import search_workers
from .common.adapters import adapters_of_recipe
from .common.arguments import (
    FileType,
    Size,
    TypeName,
    as_adapters,
    as_bytes,
    as_file_type,
    as_type,
    refuse_inputs,
    refuse_unused,
)
from .common.covariance import covariance_of_recipe, effort_of_recipe, load_covariances
from .common.encoder_device import encoder_device
from .common.importance import load_importance
from .common.messages import note
from .common.programs import layout_for, program_of
from .common.progress import OnProgress, reporting
from .convert import metadata_to_set
from .recipe_search.options import Target, search_options_of, target_of
from .recipe_search.result import name_recipe_in_warnings
from .recipe_search.search_job import SearchJob
from .writing.write_model import WriteOptions, WriteResult, finished_without_source, write_model


def quantize_model(
    source: str | Path,
    out: str | Path,
    type: FileType | None = None,
    *,
    recipe: str | Path | None = None,
    custom_q: str | Sequence[str] = (),
    imatrix: str | Path | None = None,
    covariance: str | Path | None = None,
    effort: int | None = None,
    target_size: Size | None = None,
    target_bpw: float | None = None,
    max_kld: float | None = None,
    types: str | Sequence[TypeName] | None = None,
    calibration: str | Path | None = None,
    token_embedding_type: TypeName | None = None,
    output_tensor_type: TypeName | None = None,
    ffn_gate_inp_type: TypeName | None = None,
    attn_v_type: TypeName | None = None,
    attn_qkv_type: TypeName | None = None,
    attn_k_type: TypeName | None = None,
    attn_q_type: TypeName | None = None,
    attn_output_type: TypeName | None = None,
    ffn_down_type: TypeName | None = None,
    ffn_gate_type: TypeName | None = None,
    ffn_up_type: TypeName | None = None,
    pure: bool = False,
    leave_output_tensor: bool = False,
    extra_output_tensor: TypeName | None = None,
    prune_layers: str | None = None,
    include_weights: Sequence[str] = (),
    exclude_weights: Sequence[str] = (),
    allow_requantize: bool = False,
    ignore_imatrix_rules: bool = False,
    hide_imatrix: bool = False,
    strict: bool = False,
    allow_nonfinite: bool = False,
    remote: bool = False,
    delete_source_shards: bool = False,
    metadata: str | Path | None = None,
    override_kv: Mapping[str, Any] | None = None,
    mla_layout: str | None = None,
    mtp: bool | None = None,
    vocab: bool = True,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
    program: str | None = None,
    lora: str | Path | Sequence[str | Path] = (),
    split_max_size: Size | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    keep_split: bool = False,
    only_shards: str | None = None,
    partial_requant: bool = False,
    no_timing: bool = False,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    cluster: str | None = None,
    cluster_output: str | None = None,
    device: str | None = None,
    progress: OnProgress | bool | None = None,
) -> WriteResult:
    """Quantises a model. The first matching rule wins; a rule is searched for anywhere in a tensor's name.

    source                a GGUF file, a checkpoint folder or hf:OWNER/NAME; fp8 and bf16 are decoded on the fly
    out                   the file to write
    type                  for tensors that no rule takes: a file type such as 'Q4_K_M', which gives some tensors a finer type as
                          llama-quantize does, or a tensor type such as 'iq4_k'
    recipe                a file of `regex=type` rules (text or TOML), or the name of a shipped one; what a TOML recipe says
                          under [quantize] and [convert] counts where the arguments say nothing
    custom_q              rules 'regex=type,regex=type', which come before the recipe's
    imatrix               importance matrix, GGUF or .dat; include_weights, exclude_weights: only entries with, or without, one
                          of these texts in their name; hide_imatrix: the file does not name it
    covariance            file of covariances of the matrices' inputs (`ggufmill imatrix --covariance`): codes, and with more
                          effort scales, are chosen for a small error of the products instead of the weights; effort: 0 to 3,
                          1 if nothing is said
    target_size, target_bpw, max_kld
                          the types of tensors that no rule takes are searched for, as `search_recipe` does it, and the recipe
                          is written to OUT.recipe.txt; types: to choose from; calibration: the text to measure on
    token_embedding_type, output_tensor_type, ffn_gate_inp_type
                          types of token_embd.weight, output.weight and the routers; they beat the rules
    attn_v_type ... ffn_up_type
                          types of tensors with attn_v ... ffn_up in their name that no rule takes
    pure                  every weight gets `type`, without mix and rules
    leave_output_tensor   output.weight is copied; extra_output_tensor: a second copy of it in this type
    prune_layers          layers to leave out, '20,22-25'
    allow_requantize      what is quantised already may be quantised again
    ignore_imatrix_rules  types that should not be made without an imatrix are allowed
    strict                every warning is an error
    program               that is to load the file: 'llama.cpp', 'ik_llama.cpp' or 'ollama'. Types and layout are what it knows,
                          what it does not know is an error; None: any
    no_timing             with dry_run: this machine's encoders are not timed; with a covariance they never are
    keep_split            as many files as the source has, with the same tensors
    only_shards           numbers of the split's files to write, '1,4,6-9': machines that share nothing divide a job, and each
                          file is as the whole job writes it; `merge_model` and `hash_model` refuse files of another job
    lora                  LoRA adapters, FILE or FILE=SCALE, which are merged into the weights before these are encoded: a GGUF,
                          or for a checkpoint a folder of peft
    allow_nonfinite, remote, delete_source_shards, metadata, override_kv, mla_layout, mtp, vocab, architecture,
    allow_lossy_config, split_max_size, split_max_tensors, tensor_first_split, partial_requant, verify, manifest, dry_run,
    resume, force, threads, cluster, cluster_output  as for `convert_model`
    device                of torch ('cuda') that encodes k-quants and IQK types; None: this program's encoders
    progress              stage 'quantize' in bytes; before it those of `search_recipe`, after it 'checksums' and 'verify'

    Returns a `WriteResult`. Raises as `convert_model` does, RecipeError for a recipe that cannot be read, UsageError for
    arguments that exclude each other or have nothing to act on.

    Example:
        >>> from ggufmill import quantize_model
        >>> from ggufmill.recipes import FOLDER
        >>> result = quantize_model(FOLDER / "demo", "demo.gguf", "q8_0", custom_q="exps=q4_0", force=True)
        >>> {name: count for name, (count, nbytes) in result.plan.histogram().items()}
        {'q8_0': 42, 'q4_0': 9, 'f32': 23}
    """
    call = cluster_call("quantize_model", locals())
    out, default, given = Path(out), as_file_type(type, "TYPE"), _given_rules(recipe, custom_q)
    if include_weights and exclude_weights:
        raise PlanError("--include-weights and --exclude-weights exclude each other")
    roles = {
        "attn_v": attn_v_type,
        "attn_qkv": attn_qkv_type,
        "attn_k": attn_k_type,
        "attn_q": attn_q_type,
        "attn_output": attn_output_type,
        "ffn_down": ffn_down_type,
        "ffn_gate": ffn_gate_type,
        "ffn_up": ffn_up_type,
    }
    overrides = TypeOverrides(
        as_type(token_embedding_type, "--token-embedding-type"),
        as_type(output_tensor_type, "--output-tensor-type"),
        as_type(ffn_gate_inp_type, "--ffn-gate-inp-type"),
        {role: type for role, name in roles.items() if (type := as_type(name, f"--{role.replace('_', '-')}-type")) is not None},
        leave_output_tensor,
        as_type(extra_output_tensor, "--extra-output-tensor"),
    )
    shards = parse_shards(only_shards) if only_shards is not None else None
    encoder = encoder_device(device)
    options = WriteOptions(verify, manifest, dry_run, resume, force, threads, shards)
    program = program_of(given.recipe, program)
    layout = layout_for(program, source, mla_layout or given.recipe.stages.get("convert", {}).get("mla_layout"))
    adapters = as_adapters(lora) or adapters_of_recipe(given.recipe, given.folder)
    if delete_source_shards:
        earlier = finished_without_source(source, out, layout, options, default or given.recipe.type, given.text, adapters)
        if earlier is not None:
            return earlier
    architecture = architecture or given.recipe.stages.get("convert", {}).get("architecture")
    allow_lossy_config = allow_lossy_config or given.recipe.stages.get("convert", {}).get("allow_lossy_config", False)
    mtp = mtp if mtp is not None else given.recipe.stages.get("convert", {}).get("mtp")
    vocab = vocab and given.recipe.stages.get("convert", {}).get("vocab", True)
    reading = {
        "mla_layout": layout,
        "mtp": mtp,
        "vocab": vocab,
        "remote": remote or ((dry_run or cluster is not None) and is_repository(source)),
        "architecture": architecture,
        "allow_lossy_config": allow_lossy_config,
        "lora": adapters,
    }
    opened = open_source(source, **reading)
    importance = None
    if imatrix is not None:
        importance = load_importance(Path(imatrix), opened, include=include_weights, exclude=exclude_weights)
    covariance = Path(covariance) if covariance is not None else covariance_of_recipe(given.recipe, given.folder)
    covariances = None
    if covariance is not None:
        effort = effort_of_recipe(given.recipe) if effort is None else effort
        covariances = load_covariances(covariance, opened, effort)
    else:
        refuse_unused({"--effort": effort}, "--covariance")
    if prune_layers is not None:
        opened, former_names = drop_layers(opened, parse_layers(prune_layers))
        importance = importance.renamed(former_names) if importance is not None else None
        covariances = covariances.renamed(former_names) if covariances is not None else None
    default, rules = (default, given.recipe.rules) if default is not None else recipe_types(opened, given.recipe)
    rules, text = [*given.custom, *rules], given.text
    target = target_of(given.recipe, as_bytes(target_size), target_bpw, max_kld)
    if target is None:
        given_for_target = {"--types": types, "--calibration": calibration}
        refuse_unused(given_for_target, "a target (--target-size, --target-bpw, --max-kld)")
    elif shards is not None:
        raise PlanError(
            "--only-shards divides a job whose types are known: find them once with `ggufmill search`, and give the recipe"
        )
    if imatrix is None:
        weights = {"--include-weights": tuple(include_weights), "--exclude-weights": tuple(exclude_weights)}
        refuse_unused({**weights, "--hide-imatrix": hide_imatrix}, "--imatrix")
    if not dry_run:
        refuse_unused({"--no-timing": no_timing}, "--dry-run")
    if leave_output_tensor and output_tensor_type is not None:
        raise UsageError("--leave-output-tensor copies what --output-tensor-type would make anew: give one of them")
    no_types = default is None and overrides == TypeOverrides()
    keys = metadata_to_set(metadata, override_kv)
    if no_types and not rules and target is None and not keys and prune_layers is None:
        raise PlanError("nothing to quantise to: give a TYPE such as Q4_K_M, --recipe, --custom-q or --target-size")
    planning: dict[str, Any] = {
        "program": program,
        "pure": pure,
        "allow_requantize": allow_requantize,
        "ignore_imatrix_rules": ignore_imatrix_rules,
        "hide_imatrix": hide_imatrix,
        "device": encoder,
        "override_kv": keys,
        "split_max_size": as_bytes(split_max_size) if split_max_size is not None or keep_split else given.recipe.split_max_size,
        "split_max_tensors": split_max_tensors,
        "tensor_first_split": tensor_first_split,
        "keep_split": keep_split,
        "variant": f"without layers {parse_layers(prune_layers)}" if prune_layers is not None else "",
    }
    if call is not None:
        call = call.resolved(
            lora=adapters,
            covariance=covariance,
            effort=effort if covariance is not None else None,
            mla_layout=layout,
            program=program,
            architecture=architecture,
            allow_lossy_config=allow_lossy_config,
            mtp=mtp,
            vocab=vocab,
            split_max_size=planning["split_max_size"],
        )
    inputs = [Path(path) for path in (given.path, imatrix, covariance) if path is not None]
    with reporting(progress) as report:
        if target is not None:
            if pure or not no_types:
                raise PlanError(
                    "a target leaves no room for a TYPE or types of roles: give rules (--custom-q) for what is fixed"
                )
            text_path = Path(calibration) if calibration is not None else None
            search = search_options_of(
                given.recipe, given.folder, types=types, text=text_path, threads=threads, program=program
            )
            inputs += [search.text] if search.text is not None else []
            state, fixed_text = None if dry_run else _beside(out, ".state.json"), given.rules_text
            fixed = {"fixed": rules, "fixed_text": fixed_text, "state": state, "planning": planning}
            weighted = {"covariances": covariances, "strict": strict}
            if (changed := prune_layers or include_weights or exclude_weights) and cluster is not None:
                note("note: --prune-layers, --include-weights and --exclude-weights: types are measured here, not by workers")
            weights = {"importance": importance, "imatrix": imatrix, "covariance": covariance, "effort": effort or 1}
            measuring = search_workers(None if changed else cluster, source, opened, reading, **weights, options=search)
            with measuring as workers:
                job = SearchJob(opened, importance, search, **weighted, **fixed, workers=workers, report=report)
                text = _find_recipe(job, target, out, options, inputs)
            rules = parse_rules(text)
            if call is not None:
                call = call.with_found(text)
        replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
        plan = plan_quantize(
            opened,
            out,
            type=default,
            rules=rules,
            recipe_text=text,
            overrides=overrides,
            importance=importance,
            covariances=covariances,
            strict=strict,
            nonfinite_counts=replaced,
            version=__version__,
            **planning,
        )
        if target is not None:
            name_recipe_in_warnings(plan)
            if not dry_run and (force or not plan.files[0].path.exists()):
                write_text(_beside(out, ".recipe.txt"), text)
        return write_model(
            plan,
            "quantize",
            opened,
            replace(options, cluster=call),
            report,
            inputs=inputs,
            replaced=replaced,
            delete_source_shards=delete_source_shards,
            partial_requant=partial_requant,
            timing=not no_timing and covariances is None and encoder is None,
        )


@dataclass(frozen=True)
class _GivenRules:
    """A recipe (an empty one if there is none) with the path it was read from, and the rules that come before its own.

    text: of all together, with the recipe's other tables; rules_text: of the rules alone.
    """

    path: Path | None
    recipe: Recipe
    custom: list[Rule]
    text: str
    rules_text: str

    @property
    def folder(self) -> Path:
        """What paths in the recipe are relative to."""
        return self.path.parent if self.path is not None else Path()


def _given_rules(recipe: str | Path | None, custom_q: str | Sequence[str]) -> _GivenRules:
    path = find(recipe) if recipe is not None else None
    loaded = load_recipe(path) if path is not None else Recipe("", [], "")
    texts = [custom_q] if isinstance(custom_q, str) else list(custom_q)
    custom = parse_rules("\n".join(texts), "--custom-q")
    text = "\n".join([*texts, loaded.text]).strip() if texts and path is not None else "\n".join(texts) or loaded.text
    return _GivenRules(path, loaded, custom, text, "\n".join([*texts, loaded.rules_text]))


def _find_recipe(job: SearchJob, target: Target, out: Path, options: WriteOptions, inputs: Sequence[Path]) -> str:
    """The text of the recipe for a target. Raises PlanError for what stands in the way of the output before any measuring."""
    if not options.dry_run:
        read = [*job.source.files, *inputs]
        refuse_inputs([_beside(out, ".recipe.txt"), _beside(out, ".state.json")], read)
        plan, disk = job.smallest_plan(target, out), job.largest_file(target)
        again = options.resume and job.measurements.errors  # the output may be this job's, which is known by its recipe
        preflight(plan, force=bool(options.force or again), resume=options.resume, inputs=read, needed=disk)
    return job.find(target).text


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)
