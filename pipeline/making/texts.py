"""The texts that `make` calibrates and judges with: which windows of which file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...data_classes import dataclass
from ...errors import PlanError, UsageError
from ...imatrix.texts import CalibrationText, check_texts, read_segments
from ...recipes import BUNDLED, bundled_text
from ...runtime import Model
from ..collecting.own_text import WINDOWS as OWN_WINDOWS
from ..collecting.own_text import parse_texts
from ..requests.make import MakeRequest
from .effort import Effort

N_CTX = 512
_LEAST_WINDOWS, _LEAST_CTX = 8, 32  # windows are made shorter for a text with fewer of them
_HELD_OUT = 4  # one window of so many, at the end of a text that serves for both


@dataclass(frozen=True)
class Texts:
    """Calibration and held-out text.

    calibration  files with weights; windows: of them together, None: all
    heldout      the file to judge with, from its window `first` on
    judged       windows of it, None: all
    n_ctx        tokens per window
    """

    calibration: Sequence[CalibrationText]
    windows: int | None
    heldout: Path
    first: int
    judged: int | None
    n_ctx: int


def choose_texts(request: MakeRequest, level: Effort, model: Model, own: Path) -> Texts:
    """The texts of a request, cut by its effort. Without one it is the bundled text; own: the file of what the model writes.

    Raises UsageError for several that leave none to judge with, PlanError for one that is too short.
    """
    given = [request.text] if isinstance(request.text, str | Path) else list(request.text)
    texts = parse_texts(given or [BUNDLED], own)
    check_texts(texts)
    first = texts[0].path
    writes, n_ctx = any(text.path == own for text in texts), min(N_CTX, model.n_ctx_train)
    if writes or request.heldout is not None:
        heldout = Path(request.heldout) if request.heldout is not None else bundled_text()
        n_ctx = _fitting(_tokens(model, heldout), n_ctx)
        windows = (level.windows or OWN_WINDOWS) if writes else level.windows
        return Texts(texts, windows if len(texts) == 1 else None, heldout, 0, level.judged, n_ctx)
    tokens = _tokens(model, first)
    n_ctx = _fitting(tokens, n_ctx)
    count = tokens // n_ctx
    if count < _HELD_OUT:
        raise PlanError(
            f"{first} has {tokens} tokens, too few to calibrate and to judge with: give a longer text, or another one to judge "
            "with (--heldout)"
        )
    last = max(1, count // _HELD_OUT)
    judged = last if level.judged is None else min(last, level.judged)
    if len(texts) > 1 and level.needs_text:
        raise UsageError("several texts (-f) leave nothing to judge with: give another one with --heldout")
    windows = count - last if level.windows is None else min(count - last, level.windows)
    return Texts(texts, windows, first, count - judged, judged, n_ctx)


def _tokens(model: Model, path: Path) -> int:
    return len(read_segments(model, [CalibrationText(path)])[0].tokens)


def _fitting(tokens: int, n_ctx: int) -> int:
    """Tokens of a window, fewer for a short text."""
    while n_ctx > _LEAST_CTX and tokens // n_ctx < _LEAST_WINDOWS:
        n_ctx //= 2
    return n_ctx
