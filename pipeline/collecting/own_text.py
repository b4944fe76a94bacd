"""The text that a model writes for its own calibration, where `-f self` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...imatrix.own_text import SELF, fingerprint, is_written, own_tokens, write_own_text
from ...imatrix.texts import CalibrationText, parse_text
from ...runtime import Model
from ..common.messages import note
from ..common.progress import OnProgress, Stage

WINDOWS = 100  # that are written where nobody says how many are read


def parse_texts(texts: Sequence[str | Path], own: Path) -> list[CalibrationText]:
    """Texts of -f; own: what `self` stands for, unless there is a file of that name. Raises PlanError as `parse_text`."""
    parsed = []
    for text in map(str, texts):
        name, _, weight = text.partition(":")
        is_own = name == SELF and (not weight or weight.isdecimal()) and not Path(SELF).exists()
        parsed.append(CalibrationText(own, int(weight or 1)) if is_own else parse_text(text))
    return parsed


def provide_own_text(model: Model, path: Path, tokens: int, seed: int, report: OnProgress) -> None:
    """Has the model write its text for so many tokens to be read, unless it is there. Raises as `is_written` and
    `write_own_text`."""
    tokens = own_tokens(tokens)
    if is_written(path, fingerprint(model, tokens, seed)):
        note(f"{path}: written before")
        return
    stage = Stage(report, "writing a text", tokens, "token")
    write_own_text(model, path, tokens, seed, on_tokens=lambda done, total: stage.reach(done))
