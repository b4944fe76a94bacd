"""An adapter: its changes by the names of the GGUF's tensors, and how files of adapters are named on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...data_classes import dataclass
from ...errors import PlanError
from .low_rank import LowRank


@dataclass(frozen=True)
class AdapterFile:
    """A GGUF or folder, and the factor that its changes are multiplied with."""

    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return str(self.path) if self.scale == 1 else f"{self.path}={self.scale:g}"


@dataclass(frozen=True)
class Adapter:
    """An adapter as read.

    path          as the user knows it
    architecture  general.architecture of the models it is for
    alpha         the number that a GGUF divides by the rank for the scale of a change; 0: scales are 1
    changes       name of the model's tensor -> change; its scale counts the user's factor in
    source_type   how the factors are stored: f32, f16, bf16, ...
    files         that it was read from
    notes         what was left out, one line each
    """

    path: str
    architecture: str
    alpha: float
    changes: Mapping[str, LowRank]
    source_type: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def parse_adapter(text: str | Path | AdapterFile) -> AdapterFile:
    """FILE or FILE=SCALE -> path and factor. A file whose own name ends like this is taken as it is.

    Raises PlanError for a path that does not exist, or a factor that is no finite number.
    """
    if isinstance(text, AdapterFile):
        return text
    path, scale = Path(text), 1.0
    if not path.exists() and "=" in str(text):
        name, _, factor = str(text).rpartition("=")
        path = Path(name)
        try:
            scale = float(factor)
        except ValueError:
            raise PlanError(f"--lora {text}: {factor!r} is no number; write FILE=0.5") from None
        if not abs(scale) < 1e6:
            raise PlanError(f"--lora {text}: a factor of {factor} cannot be used; write a number, as in FILE=0.5")
    if not path.exists():
        raise PlanError(
            f"--lora {text}: {path} does not exist; write FILE or FILE=SCALE, with a GGUF or a folder that peft wrote"
        )
    return AdapterFile(path, scale)
