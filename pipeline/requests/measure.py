"""What the verbs that measure models can be asked for: `perplexity`, `evaluate`, `compare`, `bench`, `sweep-bench`, `embed`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...request_fields import argument, option, request
from ...runtime.settings import PlacementOptions
from ..common.arguments import Pattern, Size
from ..common.progress import OnProgress
from .groups import CheckpointOptions, DryRun
from .running import RunningModel, window

if TYPE_CHECKING:
    from ..common.baseline import BaselineLike
    from ..common.models import ModelLike

POOLINGS = ("none", "mean", "cls", "last", "rank")
PROMPT, GENERATION = (512,), (128,)  # tokens


def _progress(stages: str) -> OnProgress | bool | None:
    return option(f"Call this with each `Progress` report; True shows a bar. {stages}", default=None, in_cli=False)


def _chunks(shown: str) -> int | None:
    return option("Read only this many windows.", default=None, least=1, shown=shown)


@request
class FullHash:
    full_hash: bool = option(
        "Compute the digests of model files from every byte; otherwise large files are sampled.", default=False, rare=True
    )


@request
class WindowsMemory:
    memory: Size | None = option(
        "Run no more windows in one pass than this much memory takes, such as 4G; the figures do not depend on it.",
        default=None,
        kind="size",
        shown="as many as fit into -b",
    )


@request
class PerplexityRequest(FullHash, DryRun, WindowsMemory, RunningModel):
    model: ModelLike | Sequence[ModelLike] = argument(
        "A GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave; or several, which are all open at the "
        "same time: the baseline reads each window once for all of them.",
        kind="model",
        metavar="MODEL...",
        kw_only=False,
    )
    text: str | Path | None = option(
        "Read this text.",
        default=None,
        flags="-f --file -bf --binary-file",
        kind="text",
        shown="the tokens in the baseline's file",
        kw_only=False,
    )
    n_ctx: int | None = window("512, or that of the baseline's predictions")
    chunks: int | None = _chunks("all")
    kl_divergence: BaselineLike | None = option(
        "Compare with this model, usually the bf16 one, or with the predictions in a file (without a value: that of "
        "--kl-divergence-base): KL divergence and agreement on the top token.",
        doc="A baseline with the same vocabulary, usually the bf16 model, or a file of its predictions: KL divergence, "
        "agreement on the top token; True: the file is kl_divergence_base.",
        default=None,
        metavar="[MODEL|FILE]",
    )
    kl_divergence_base: str | Path | None = option(
        "Write the predictions of the baseline, or without one of MODEL, to this file of llama-perplexity's format.",
        default=None,
        flags="--kl-divergence-base --save-all-logits",
        kind="out_file",
        metavar="FILE",
    )
    top_logits: int | None = option(
        "Write only the K most probable tokens of each prediction to the file of --kl-divergence-base, in a format of "
        "ggufmill's own.",
        default=None,
        least=1,
        most=1 << 16,
        metavar="K",
        rare=True,
    )
    noise_floor: bool = option(
        "Measure the noise floor too: the baseline's KL divergence when its activations are rounded to bf16.", default=False
    )
    mtp: bool = option(
        "Measure each draft layer too: its perplexity, its agreement with the model, how many drafts are accepted.",
        default=False,
    )
    compare_with: str | Path | None = option(
        "Compare with what an earlier run wrote with --json: say whether the two can be compared, and how they differ.",
        default=None,
        kind="file",
        metavar="RESULT",
    )
    cluster: str | None = option(
        "Divide the windows among dask workers, with the same figures: tcp://HOST:PORT, a scheduler file, or local:N.",
        default=None,
        metavar="ADDRESS",
    )
    force: bool = option("Replace an existing file of predictions.", default=False)
    progress: OnProgress | bool | None = _progress(
        "Stage 'perplexity' in windows, `partial` a list with each model's `Perplexity` so far; with full_hash 'checksum'."
    )


@request
class TasksRequest(FullHash, RunningModel):
    model: ModelLike = argument("As for `perplexity`.", kind="model", kw_only=False)
    text: str | Path = option("Read the tasks from this file.", kw_only=False)
    kind: str = option(
        "Read tasks of this kind: 'hellaswag' (six lines per task), 'winogrande' (a line with commas per "
        "task) or 'multiple-choice' (binary; ARC, MMLU, TruthfulQA).",
        kw_only=False,
    )
    tasks: int | None = option(
        "Score only this many tasks at random, the ones that llama-perplexity takes.", default=None, shown="all"
    )
    progress: OnProgress | bool | None = _progress("A stage of the kind's name, in tasks.")


@request
class EvaluateRequest(DryRun, WindowsMemory, RunningModel):
    models: str | Path | Sequence[str | Path] = argument(
        "GGUF files, checkpoint folders, folders of GGUF files, or patterns such as 'quants/*.gguf'.",
        metavar="[MODEL|FOLDER|PATTERN]...",
        kw_only=False,
    )
    text: str | Path | Sequence[str | Path] | None = option(
        "Read this text; several, with names (code=FILE), are judged one by one too.",
        doc="PATH or NAME=PATH, or several: each is a domain, which has figures of its own.",
        default=None,
        flags="-f --file",
        kind="named_texts",
        metavar="[NAME=]FILE",
        shown="the tokens in the baseline's file",
        kw_only=False,
    )
    against: str | Path = option(
        "Compare with this baseline, usually the bf16 model, or a file of its predictions.", kind="model", metavar="BASE"
    )
    n_ctx: int | None = window("512, or that of the baseline's predictions")
    chunks: int | None = _chunks("all")
    tasks: str | Path | Sequence[str | Path] | None = option(
        "Let the models answer these questions, and count right answers: JSON lines with question and answer (as GSM8K has "
        "them), or lines of a question, a tab and its answer. A text (-f) is not needed then.",
        default=None,
        flags="--tasks",
        kind="named_texts",
        metavar="[NAME=]FILE",
        section="Questions",
    )
    task_questions: int | None = option(
        "Read only this many questions of each file, its first.",
        default=None,
        least=1,
        metavar="N",
        shown="all",
        section="Questions",
    )
    task_answer: str | None = option(
        "Compare what this regular expression finds last in an answer (its first group, if it has one).",
        default=None,
        metavar="REGEX",
        shown="the last number where the right answer is one, else the whole answer",
        section="Questions",
    )
    n_predict: int = option(
        "Generate at most this many tokens per answer; -1: as many as fit into the context.",
        default=512,
        flags="-n --n-predict",
        least=-1,
        section="Questions",
    )
    template: str | Path | None = option(
        "Use this chat template for questions: a Jinja file, or a name such as chatml, llama3, gemma.",
        default=None,
        metavar="FILE|NAME",
        shown="the model's own",
        section="Questions",
    )
    out: str | Path = option(
        "Write results.json, table.md, plot.png and the baseline's outputs to this folder, which is created if it "
        "does not exist.",
        default="evaluation",
        flags="-o --out",
        kind="folder",
    )
    stock: str | Sequence[str] = option(
        "Judge these file types of BASE too, without writing them.",
        doc="File types ('Q4_K_M,Q5_K_M' or a list) of the baseline that are measured without writing them; these, and models "
        "that were made by file type and without a recipe, are joined by a line in the picture.",
        default="",
        metavar="T,T,...",
    )
    imatrix: str | Path | None = option("Use this importance matrix for --stock, GGUF or .dat.", default=None, kind="file")
    join: str | Path | Sequence[str | Path] = option(
        "Add what another call measured on the same text, from its file of results.",
        default=(),
        kind="files",
        metavar="RESULTS",
    )
    noise_floor: bool = option(
        "Measure no noise floor: leave out the run of BASE with activations rounded to bf16.",
        doc="Whether BASE runs again with activations rounded to bf16: smaller KL divergences than that mean nothing.",
        default=True,
    )
    plot: str | Path | None = option(
        "Draw the figures to this file (.png, .svg, .pdf), which needs matplotlib.",
        default=None,
        kind="plot",
        shown="plot.png in the folder",
    )
    no_plot: bool = option("Draw no picture; without matplotlib none is drawn.", default=False)
    progress: OnProgress | bool | None = _progress("A stage 'baseline' and one with each model's name, in windows.")


@request
class CompareRequest(FullHash, DryRun, RunningModel):
    a: ModelLike = argument("The better model, usually the bf16 one; as for `perplexity`.", kind="model", kw_only=False)
    b: ModelLike = argument("A quantisation of it; as for `perplexity`.", kind="model", kw_only=False)
    text: str | Path | None = option(
        "Let both models read this text, for the errors of the layers; without it only weights are compared.",
        default=None,
        flags="-f --file",
        kind="text",
        kw_only=False,
    )
    n_ctx: int | None = window("512")
    chunks: int | None = _chunks("1")
    tensors: Pattern | None = option(
        "Compare only weights of tensors with a match in their name.", default=None, kind="regex", shown="all weights"
    )
    no_weights: bool = option(
        "Compare only the layers, which is faster: comparing weights decodes every tensor of both models.", default=False
    )
    memory: Size | None = option(
        "Decode weights with no more threads than this much memory takes, such as 1G; the figures do not depend on it.",
        default=None,
        kind="size",
        shown="all threads",
        rare=True,
    )
    products: bool = option(
        "Compare each tensor's products too, with the inputs that it has in model A (this needs a text).", default=False
    )
    plot: str | Path | None = option(
        "Draw the errors to this file (.png, .svg, .pdf), which needs matplotlib.", default=None, kind="plot"
    )
    progress: OnProgress | bool | None = _progress("Stage 'compare' in bytes of the weights; with full_hash 'checksum'.")


@request
class SweepRequest(RunningModel):
    model: ModelLike = argument("As for `perplexity`.", kind="model", kw_only=False)
    n_ctx: int | None = option(
        "Measure up to this many tokens of context.", default=None, flags="-c --ctx-size", least=4, most=2**31 - 1, shown="4096"
    )
    pp: int | None = option("Read this many prompt tokens per step.", default=None, least=1, shown="-ub, or 512")
    tg: int | None = option(
        "Generate this many tokens per step.", default=None, flags="-n --tg", least=1, shown="a quarter of the prompt's"
    )
    repetitions: int = option(
        "Measure this many times at each depth and show the means; the picture then has bars of error.",
        default=1,
        flags="-r --repetitions",
        least=1,
    )
    no_warmup: bool = option("Skip the warm-up: the first figures then include the compilation of kernels.", default=False)
    plot: str | Path | None = option(
        "Draw the speeds to this file (.png, .svg, .pdf), which needs matplotlib.", default=None, kind="plot"
    )
    progress: OnProgress | bool | None = _progress("Stage 'sweep-bench' in depths, `partial` the `SweepResult` so far.")


@request
class EmbedRequest(RunningModel):
    model: ModelLike = argument("As for `perplexity`.", kind="model", kw_only=False)
    prompt: str | Sequence[str] = option(
        "Embed this text; may be given several times.", default=(), flags="-p --prompt", kw_only=False
    )
    file: str | Path | None = option(
        "Embed each line of this file; empty lines are left out.", default=None, flags="-f --file", kind="text"
    )
    pooling: str | None = option(
        "Pool the tokens' vectors in this way; rank scores a query and a document, with a tab between.",
        doc="'none': a vector per token; 'mean' of all tokens, 'cls': the first one's, 'last': the last one's; 'rank': the "
        "score of a query and a document, which a tab separates. None: what the model says, else 'mean', or 'last' of a model "
        "whose tokens do not see later ones.",
        default=None,
        choices=POOLINGS,
        shown="the model's",
    )
    normalize: bool = option("Divide vectors by their lengths.", default=True, flags="--normalize/--no-normalize")
    progress: OnProgress | bool | None = _progress("Stage 'embed' in texts.")


def _grid(help: str, flags: str, kind: str, shown: str, rare: bool = False) -> Sequence:
    return option(help, default=(), flags=flags, kind=kind, shown=shown, section="Model and threads", rare=rare)


@request
class BenchRequest(PlacementOptions, CheckpointOptions):
    models: str | Path | Sequence[str | Path] = argument(
        "A GGUF file or checkpoint folder, or several.", kind="model", kw_only=False
    )
    n_prompt: int | Sequence[int] = option(
        "Read prompts of these lengths; 0 reads none.", default=PROMPT, flags="-p --n-prompt", kind="numbers", shown="512"
    )
    n_gen: int | Sequence[int] = option(
        "Generate this many tokens after an empty context; 0 generates none.",
        default=GENERATION,
        flags="-n --n-gen",
        kind="numbers",
        shown="128",
    )
    prompt_and_gen: Sequence[tuple[int, int]] = option(
        "Time a prompt and then generation together.", default=(), flags="-pg", kind="pairs"
    )
    gen_after_prompt: Sequence[tuple[int, int]] = option(
        "Time generation after a prompt that is not timed.", default=(), flags="-gp", kind="pairs"
    )
    repetitions: int = option("Repeat each test this many times.", default=5, flags="-r --repetitions", least=1)
    warmup: bool = option("Run each test once before measuring.", default=True, flags="-w --warmup", kind="zero_one", shown="1")
    threads: int | Sequence[int] = _grid("Use these numbers of threads.", "-t --threads", "numbers", "all processors")
    batch: int | Sequence[int] = _grid("Use these logical batch sizes, in tokens.", "-b --batch-size", "numbers", "2048")
    ubatch: int | Sequence[int] = _grid("Run this many tokens per pass.", "-ub --ubatch-size", "numbers", "2048")
    cache_k: str | Sequence[str] = _grid("Cache keys in these types.", "-ctk --cache-type-k", "cache_types", "f16")
    cache_v: str | Sequence[str] = _grid("Cache values in these types.", "-ctv --cache-type-v", "cache_types", "f16")
    k_cache_hadamard: bool | Sequence[bool] = _grid(
        "Rotate keys before they are cached: 0, 1 or both.",
        "-khad --k-cache-hadamard",
        "zeros_ones",
        "1 where they are quantised",
        rare=True,
    )
    v_cache_hadamard: bool | Sequence[bool] = _grid(
        "Rotate values before they are cached: 0, 1 or both.",
        "-vhad --v-cache-hadamard",
        "zeros_ones",
        "1 where they are quantised",
        rare=True,
    )
    flash: bool | Sequence[bool] = _grid("Use flash attention: 0, 1 or both.", "-fa --flash-attn", "zeros_ones", "1")
    mla: int | Sequence[int] = _grid(
        "Compute latent attention in these ways, 0 to 3.", "-mla --mla-use", "numbers", "3", rare=True
    )
    attn_max_batch: int | Sequence[int] = _grid(
        "Use at most this many MiB for the buffers of attention.", "-amb --attn-max-batch", "numbers", "512", rare=True
    )
    repack: bool | Sequence[bool] = _grid(
        "Interleave rows when loading: 0, 1 or both.", "-rtr --run-time-repack", "zeros_ones", "0"
    )
    progress: OnProgress | bool | None = _progress("Stage 'bench' in tests, `partial` the `BenchResult` so far.")
