"""The models that `evaluate` judges: files, folders and patterns; and stock mixes of the baseline, which no file holds."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats import TensorSource
from ...formats.gguf import SPLIT_NAME
from ...quantize.gguf_source import simulate_quantization
from ...quantize.importance import Importance
from ...quantize.planning import plan_quantize
from ...quantize.recipes.mixes import file_type_id, file_types


@dataclass(frozen=True)
class StockMix:
    """A file type ('Q4_K_M') of the baseline, as `quantize` would write it: the model, and the bytes of the file."""

    name: str
    source: TensorSource
    file_bytes: int

    @property
    def path(self) -> str:
        return f"{self.name} of {self.source.path}"


def find_models(given: Sequence[str | Path]) -> list[Path]:
    """The models of files, checkpoint folders, folders of GGUF files and patterns, each once; of a split GGUF the first file.

    Raises PlanError for what is not there, and for a folder without models.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, given):
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path)))]
        if not matches:
            raise PlanError(f"there is no {path}")
        for match in matches:
            models = [match]
            if match.is_dir() and not (match / "config.json").exists():
                models = sorted(file for file in match.glob("*.gguf") if _is_first(file))
                if not models:
                    raise PlanError(f"{match} has no GGUF file and no config.json")
            found |= {model.resolve(): model for model in models}
    return list(found.values())


def _is_first(path: Path) -> bool:
    part = SPLIT_NAME.match(path.name)
    return part is None or int(part["number"]) == 1


def stock_mix(source: TensorSource, name: str, importance: Importance | None) -> StockMix:
    """source: of the baseline; name: of a file type. Raises PlanError for one that cannot be made of it."""
    plan = plan_quantize(source, "stock.gguf", type=name, importance=importance, ignore_imatrix_rules=True)
    return StockMix(name, simulate_quantization(source, plan), plan.file_bytes)


def stock_name(metadata: dict[str, Any]) -> str | None:
    """The file type that a file's metadata name, of a file made without a recipe; None for any other."""
    number = metadata.get("general.file_type")
    if number is None or "ggufmill.recipe" in metadata:
        return None
    return next((name for name in file_types() if file_type_id(name) == int(number)), None)
