"""Opening a model of either kind, a Hugging Face checkpoint folder or a GGUF, as a source of tensors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ..formats import FormatError, PlanError, TensorSource
from ..formats.safetensors import LocalShard
from ..quantize import gguf_source
from .checkpoint import Description, assemble, open_checkpoint
from .config import Config, read_config
from .hub.hub import Fetched, fetch_repository, is_repository
from .metadata import general, size_label
from .model_card import card_metadata
from .tokenizers.vocabulary import read_vocabulary

# name in config.json's `architectures` -> MODULE.FUNCTION here, called as function(config, mla_layout) -> Description
ARCHITECTURES = {
    "LlamaForCausalLM": "llama.llama",
    "MistralForCausalLM": "llama.mistral",
    "MixtralForCausalLM": "llama.mixtral",
    "Qwen2ForCausalLM": "qwen.qwen2",
    "Qwen2MoeForCausalLM": "qwen.qwen2moe",
    "Qwen3ForCausalLM": "qwen.qwen3",
    "Qwen3MoeForCausalLM": "qwen.qwen3moe",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3",
    "DeepseekV2ForCausalLM": "deepseek.deepseek2",
    "DeepseekV3ForCausalLM": "deepseek.deepseek2",
    "Glm4MoeForCausalLM": "glm4.glm4moe",
    "GptOssForCausalLM": "gpt_oss.gpt_oss",
    "Ernie4_5ForCausalLM": "ernie.ernie",
    "Ernie4_5_ForCausalLM": "ernie.ernie",
    "Ernie4_5_MoeForCausalLM": "ernie.ernie_moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan.hunyuan_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan.hunyuan_moe",
    "Phi3ForCausalLM": "phi3.phi3",
    "Starcoder2ForCausalLM": "starcoder2.starcoder2",
    "CohereForCausalLM": "cohere.command_r",
    "Cohere2ForCausalLM": "cohere.cohere2",
    "Olmo2ForCausalLM": "olmo2.olmo2",
    "GraniteForCausalLM": "granite.granite",
    "MiniCPM3ForCausalLM": "minicpm3.minicpm3",
    "MiniMaxM2ForCausalLM": "minimax.minimax_m2",
    "ExaoneForCausalLM": "exaone.exaone",
    "Exaone4ForCausalLM": "exaone.exaone4",
    "NemotronForCausalLM": "nemotron.nemotron",
    "SmolLM3ForCausalLM": "smollm3.smollm3",
    "SeedOssForCausalLM": "seed_oss.seed_oss",
    "BailingMoeForCausalLM": "bailing.bailing",
    "Dots1ForCausalLM": "dots1.dots1",
    "LlavaForConditionalGeneration": "multimodal.text_model",
    "LlavaNextForConditionalGeneration": "multimodal.text_model",
    "Mistral3ForConditionalGeneration": "multimodal.text_model",
    "KimiVLForConditionalGeneration": "multimodal.text_model",
    "KimiK25ForConditionalGeneration": "multimodal.text_model",
    "InternVLForConditionalGeneration": "multimodal.text_model",
}
MLA_LAYOUTS = ("ik", "mainline", "legacy")


def open_source(path: str | Path, *, mla_layout: str | None = None, remote: bool = False) -> TensorSource:
    """A checkpoint folder (config.json, *.safetensors, tokenizer.json), a .gguf file, or hf:OWNER/NAME[@REVISION] as a source.

    mla_layout: how DeepSeek's latent attention is laid out, 'ik' (also for None), 'mainline' or 'legacy'; without effect on
    other architectures, and not for a GGUF, which has the layout it has. A repository is downloaded into the hub's cache;
    remote: but for the weights, of which only headers are read now, and the rest when it is needed. No tensor data is read.
    Raises FormatError for what is malformed, incomplete or of an unknown architecture, and PlanError for an unknown layout, or
    one for a GGUF.
    """
    if mla_layout not in (None, *MLA_LAYOUTS):
        raise PlanError(f"unknown MLA layout {mla_layout!r}; known are {', '.join(MLA_LAYOUTS)}")
    if is_repository(path):
        return _checkpoint_source(fetch_repository(str(path), remote=remote), mla_layout or MLA_LAYOUTS[0])
    path = Path(path)
    if remote:
        raise PlanError(f"{path}: only a repository (hf:OWNER/NAME) can be read remotely")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FormatError(f"{path} is no checkpoint: it has no config.json")
        return _checkpoint_source(Fetched(str(path), path), mla_layout or MLA_LAYOUTS[0])
    if path.suffix == ".gguf":
        if mla_layout is not None:
            raise PlanError(f"{path} has the MLA layout it has: another ({mla_layout}) is made from the checkpoint")
        return gguf_source(path)
    problem = "is neither a checkpoint folder nor a .gguf file" if path.exists() else "does not exist"
    raise FormatError(f"{path} {problem}")


def describe(folder: Path, mla_layout: str | None = None) -> Description:
    """What config.json of a checkpoint folder says of the GGUF to come; shards need not be there. Raises FormatError."""
    config = read_config(folder)
    return _describer(config)(config, mla_layout or MLA_LAYOUTS[0])


def _checkpoint_source(fetched: Fetched, mla_layout: str) -> TensorSource:
    folder = fetched.folder
    checkpoint = open_checkpoint(folder, fetched.shards, fetched.origin, fetched.expect)
    config = checkpoint.config
    description = _describer(config)(config, mla_layout)
    tensors, left_out = assemble(checkpoint, description)
    vocabulary, vocabulary_notes = read_vocabulary(folder, config, description.n_vocab)
    notes = [*left_out, *description.notes, *vocabulary_notes]
    metadata = general(description.architecture, folder, config) | card_metadata(folder, notes)
    metadata["general.size_label"] = size_label({name: t.shape for name, t in tensors.items()})
    metadata |= description.metadata | vocabulary
    shards = {t.path: t.shard for t in checkpoint.stored.values() if isinstance(t.shard, LocalShard)}
    return TensorSource(
        fetched.name, metadata, tensors, checkpoint.identity, files=checkpoint.files, notes=notes, shards=shards
    )


def _describer(config: Config) -> Callable[[Config, str], Description]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        said = f"the architecture {name}" if name else "no architecture"
        raise config.fail(f"{said} is named; known are {', '.join(ARCHITECTURES)}")
    module, function = ARCHITECTURES[name].split(".")
    return getattr(import_module(f".architectures.{module}", __package__), function)
