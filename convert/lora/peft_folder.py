"""Reading an adapter as peft saves it: adapter_config.json and adapter_model.safetensors.

Names and factors are those of `peft.tuners.lora` (huggingface/peft): the scale is alpha / r, with rslora alpha / sqrt(r)
(arXiv:2312.03732); rank_pattern and alpha_pattern set both for modules by regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path

import numpy as np

from ...data_classes import dataclass
from ...formats.safetensors import StoredTensor, read_safetensors
from ...jobs.patterns import NamePattern, PatternError
from ..config import Config, read_json
from ..quantization.stored_weights import StoredWeight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:(?P<part>[AB])\.weight|embedding_(?P<embedding>[AB]))")
# what the name of another tensor has in it -> what it stands for
_REFUSED = {
    "lora_magnitude_vector": "DoRA, whose change is no product of two matrices",
    "modules_to_save": "a module that was trained as a whole (modules_to_save)",
    "trainable_tokens": "tokens that were trained as a whole (trainable_token_indices)",
    "bias": "a bias that was trained",
    "embed_tokens": "embeddings that were trained as a whole, perhaps for new tokens",
    "lm_head": "an output that was trained as a whole, perhaps for new tokens",
}
_MERGE_FIRST = "merge it into the model with peft (merge_and_unload) and convert that"
# settings of adapter_config.json that change what the factors mean
_UNSUPPORTED = ("use_dora", "use_qalora", "alora_invocation_tokens", "layer_replication", "arrow_config", "velora_config")
_UNSUPPORTED += ("kasa_config", "lora_bias")


@dataclass(frozen=True)
class PeftFactors:
    """The factors of one module.

    a, b          float32 [r, inputs] and [outputs, r]; of a stack of experts [experts * r, inputs] and [outputs, r * experts]
    transposed    the stored weight is [inputs, outputs] (embeddings, Conv1D)
    """

    module: str
    a: np.ndarray
    b: np.ndarray
    transposed: bool


@dataclass(frozen=True)
class PeftFolder:
    """An adapter.

    alpha, alphas  lora_alpha; alpha_pattern: regular expressions of modules whose alpha is another
    rank, ranks    r; rank_pattern: likewise
    rslora         scales are alpha / sqrt(r)
    factors        by module
    source_type    of the first factor
    """

    path: Path
    alpha: float
    alphas: Mapping[NamePattern, float]
    rank: int
    ranks: Mapping[NamePattern, float]
    rslora: bool
    factors: dict[str, PeftFactors]
    source_type: str

    @property
    def files(self) -> tuple[Path, ...]:
        return self.path / CONFIG, self.path / WEIGHTS

    def scale(self, factors: PeftFactors, parameter: str, matrices: int = 1) -> float:
        """By which b @ a is multiplied. parameter: full name of the weight that is changed; matrices: of the stack."""
        rank = factors.a.shape[0] // matrices
        alpha = _matching(self.alphas, factors, parameter, self.alpha)
        return alpha / (sqrt(rank) if self.rslora else rank)

    def experts(self, factors: PeftFactors, parameter: str) -> int:
        """Number of matrices of the stack that the factors are of, by the rank that the configuration gives them; 0: none."""
        rank = int(_matching(self.ranks, factors, parameter, self.rank))
        return 0 if len(factors.a) % rank else len(factors.a) // rank


def _matching(patterns: Mapping[NamePattern, float], factors: PeftFactors, parameter: str, default: float) -> float:
    names = (factors.module, parameter)
    return next((value for pattern, value in patterns.items() if any(map(pattern.search, names))), default)


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def peft_config(folder: Path) -> Config:
    """adapter_config.json. Raises FormatError if it is absent or malformed."""
    return Config(folder / CONFIG, read_json(folder / CONFIG))


def read_peft_folder(folder: Path) -> PeftFolder:
    """All factors of an adapter. Raises FormatError for what is no LoRA adapter, is damaged, or changes more than products."""
    config = peft_config(folder)
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise config.error(f"peft_type is {config.get('peft_type')!r:.40}; only LORA can be converted")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise config.error(f"{key} is set, which no GGUF can say; {_MERGE_FIRST}")
    alpha, conv1d = config.number("lora_alpha"), config.flag("fan_in_fan_out", False)
    path = folder / WEIGHTS
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise config.error(f"the weights are in adapter_model.bin, which can run code when it is read; save them as {WEIGHTS}")
    found: dict[str, dict[str, StoredTensor]] = {}
    embeddings: set[str] = set()
    stored = read_safetensors(path)
    for name, tensor in stored.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            what = next((text for part, text in _REFUSED.items() if part in name), "no factor of a low-rank product")
            raise config.error(f"{name} is {what}; {_MERGE_FIRST}")
        module = match["module"].removeprefix(PREFIX)
        found.setdefault(module, {})[match["part"] or match["embedding"]] = tensor
        if match["embedding"]:
            embeddings.add(module)
    if not found:
        raise config.error(f"{WEIGHTS} has no tensors")
    factors = {}
    for module, parts in found.items():
        if len(parts) < 2:
            raise config.error(f"{module} has lora_{next(iter(parts))} only; lora_A and lora_B are needed")
        a, b = (_matrix(config, parts[part]) for part in "AB")
        if a.shape[0] != b.shape[1]:
            raise config.error(f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit together")
        transposed = module in embeddings or conv1d
        factors[module] = PeftFactors(module, a, b, transposed)
    source_type = next(iter(stored.values())).source_type
    alphas, ranks = (_patterns(config, key) for key in ("alpha_pattern", "rank_pattern"))
    rank, rslora = config.integer("r", 8), config.flag("use_rslora", False)  # 8: peft's default
    return PeftFolder(folder, alpha, alphas, rank, ranks, rslora, factors, source_type)


def _matrix(config: Config, tensor: StoredTensor) -> np.ndarray:
    """float32 of the tensor's shape. Raises FormatError for one that is no matrix, or has numbers that are not finite."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise config.error(f"{tensor.name} has shape {list(tensor.shape)}; only adapters of matrices can be converted")
    values = StoredWeight(tensor).read(slice(0, tensor.shape[0])).astype(np.float32)
    if not np.isfinite(values).all():
        raise config.error(f"{tensor.name} has numbers that are not finite")
    return values


def _patterns(config: Config, key: str) -> dict[NamePattern, float]:
    """alpha_pattern, rank_pattern: names of modules, or their ends after a dot -> a number. Raises FormatError."""
    if config.get(key) is None:
        return {}
    patterns, numbers = config.section(key), {}
    for pattern in patterns.values:
        number = patterns.number(pattern) if key == "alpha_pattern" else patterns.integer(pattern)
        try:
            numbers[NamePattern(rf"^(.*\.)?({pattern})$")] = number
        except PatternError:
            raise config.error(f"{key} has {pattern!r:.60}, which is no regular expression") from None
    return numbers
