"""Opening a model of either kind, a Hugging Face checkpoint folder or a GGUF, as a source of tensors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ..formats import FormatError, PlanError, TensorSource
from ..quantize import gguf_source
from .checkpoint import Description, assemble, open_checkpoint
from .config import Config
from .metadata import general, size_label
from .vocabulary import read_vocabulary

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
}
MLA_LAYOUTS = ("ik", "mainline", "legacy")


def open_source(path: str | Path, *, mla_layout: str = "ik") -> TensorSource:
    """A checkpoint folder (config.json, *.safetensors, tokenizer.json) or a .gguf file as a source.

    mla_layout: how DeepSeek's latent attention is laid out, 'ik', 'mainline' or 'legacy'; without effect on others and on a
    GGUF. No tensor data is read. Raises FormatError for what is malformed, incomplete or of an unknown architecture, and
    PlanError for an unknown layout.
    """
    if mla_layout not in MLA_LAYOUTS:
        raise PlanError(f"unknown MLA layout {mla_layout!r}; known are {', '.join(MLA_LAYOUTS)}")
    path = Path(path)
    if path.is_dir():
        return _checkpoint_source(path, mla_layout)
    if path.suffix == ".gguf":
        return gguf_source(path)
    problem = "is neither a checkpoint folder nor a .gguf file" if path.exists() else "does not exist"
    raise FormatError(f"{path} {problem}")


def _checkpoint_source(folder: Path, mla_layout: str) -> TensorSource:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    description = _describer(config)(config, mla_layout)
    tensors, left_out = assemble(checkpoint, description)
    vocabulary, vocabulary_notes = read_vocabulary(folder, config, description.n_vocab)
    metadata = general(description.architecture, folder, config)
    metadata["general.size_label"] = size_label({name: t.shape for name, t in tensors.items()})
    metadata |= description.metadata | vocabulary
    notes = [*left_out, *description.notes, *vocabulary_notes]
    return TensorSource(str(folder), metadata, tensors, checkpoint.identity, files=checkpoint.files, notes=notes)


def _describer(config: Config) -> Callable[[Config, str], Description]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        said = f"the architecture {name}" if name else "no architecture"
        raise config.fail(f"{said} is named; known are {', '.join(ARCHITECTURES)}")
    module, function = ARCHITECTURES[name].split(".")
    return getattr(import_module(f".{module}", __package__), function)
