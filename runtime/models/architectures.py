"""The table of architectures, and the graph of a model: from its tensors and metadata."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from ...formats import PlanError, TensorSource
from ..graph import Graph
from ..hparams import HParams, n_draft_layers, n_layers
from . import bert, deepseek2, deepseek4, gemma3n, gemma4, llama, longcat_flash, openpangu, qwen3next, qwen4exp
from .delta_net import DELTA_NET_ARCHITECTURES
from .recurrent import hybrid
from .recurrent.variants import RECURRENT_VARIANTS
from .variants import ENCODERS, VARIANTS

Build = Callable[[TensorSource, HParams, int | None], Graph]

# general.architecture -> what builds its graph
ARCHITECTURES: dict[str, Build] = {
    **dict.fromkeys(VARIANTS, llama.build),
    "gemma3n": gemma3n.build,
    "gemma4": gemma4.build,
    **dict.fromkeys(ENCODERS, bert.build),
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa", "mistral4", "minicpm3"), deepseek2.build),
    "longcat-flash": longcat_flash.build,
    "deepseek4": deepseek4.build,
    "openpangu": openpangu.build,
    **dict.fromkeys(DELTA_NET_ARCHITECTURES, qwen3next.build),
    "qwen4exp": qwen4exp.build,
    **dict.fromkeys(RECURRENT_VARIANTS, hybrid.build),
}


def build_graph(source: TensorSource, n_ctx: int | None = None) -> Graph:
    """The graph of a model; n_ctx: tokens that a sequence may have (None: what the model was trained for).

    Raises PlanError for an architecture, or an option of it, that is not known, FormatError when tensors or metadata keys are
    missing or do not fit together.
    """
    build = ARCHITECTURES.get(source.architecture)
    if build is None:
        near = get_close_matches(source.architecture.lower(), ARCHITECTURES, 1, 0)[0]
        raise PlanError(
            f"{source.path}: architecture {source.architecture!r} cannot be run; the nearest that can is {near!r}; "
            "docs/adding/architecture.md says how to add one"
        )
    return build(source, HParams(source.metadata, source.path), n_ctx)


# architectures whose draft layers can be run; their `build` takes the number of a draft layer's block
DRAFTING: dict[str, Callable[[TensorSource, HParams, int | None, int], Graph]] = {
    **dict.fromkeys(("glm4moe", "bailingmoe2", "exaone-moe", "mimo2", "step35"), llama.build),
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa"), deepseek2.build),
    **dict.fromkeys(DELTA_NET_ARCHITECTURES, qwen3next.build),
    "bailingmoe3": hybrid.build,
}


def build_draft_graphs(source: TensorSource, n_ctx: int | None = None) -> list[Graph]:
    """The graphs of a model's draft layers, in order; none where it has none. Raises as `build_graph`."""
    hparams = HParams(source.metadata, source.path)
    count, first = n_draft_layers(hparams), n_layers(hparams)
    build = DRAFTING.get(source.architecture)
    if count and build is None:
        raise PlanError(f"{source.path}: draft layers of architecture {source.architecture!r} cannot be run")
    return [build(source, hparams, n_ctx, first + number) for number in range(count)] if build is not None else []
