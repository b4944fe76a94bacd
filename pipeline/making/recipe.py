"""The TOML recipe that `make` writes: everything that decides the result, so that `run` makes the same file of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...convert.hub.fetch import is_repository
from ...errors import installation
from ...formats import TensorSource
from ...quantize.recipes.recipe import PATH_KEYS
from ...quantize.recipes.variants import toml_text
from ...recipes import BUNDLED, bundled_text
from ...request_fields import fields_of
from ..common.messages import note
from ..planning import HIGHEST_EFFORT
from ..recipe_search.options import parse_types
from ..requests.groups import SourceOptions
from ..requests.make import MakeRequest
from ..tuning.descent import judging
from ..writing.sequential import WINDOWS, windows_within
from .effort import Effort
from .fit import Fit
from .texts import Texts

MADE = "# Made by `ggufmill make`"  # what a recipe of it begins with
Tables = dict[str, dict[str, Any]]


def recipe_text(request: MakeRequest, source: TensorSource, level: Effort, fit: Fit, texts: Texts, working: str | None) -> str:
    """The recipe. level: what can be done of the effort; working: the type of a copy that runs in place of the source. Paths in
    it are absolute."""
    tables: Tables = {"source": _source(request, source) | ({"working": working} if working is not None else {})}
    for name, value in _reading(request).items():
        stage, _, key = name.partition(".")
        tables.setdefault(stage, {})[key] = value
    cut = {"ctx": texts.n_ctx} | ({"chunks": texts.windows} if texts.windows is not None else {})
    names = [f"{_name(text.path)}:{text.weight}" if text.weight != 1 else _name(text.path) for text in texts.calibration]
    if level.data:
        more = {level.data: True} if level.data != "imatrix" else {}
        tables["imatrix"] = {"text": names[0] if len(names) == 1 else names, **cut, **more}
    encoder = _encoder(request, level, texts) if level.data in ("covariance", "curvature") else {}
    tables["quantize"] = {"target_size": fit.nbytes, **encoder, **tables.pop("quantize", {})}
    search: dict[str, Any] = dict(level.search)
    if "chunks" in search:
        search = {"text": _name(texts.calibration[0].path), "ctx": texts.n_ctx, **search}
        search["chunks"] = min(search["chunks"], texts.windows or search["chunks"])
    if request.types is not None:
        search["types"] = ",".join(kind.name for kind in parse_types(request.types, program=request.program))
    tables["search"] = search
    judged = {"from_chunk": texts.first} if texts.first else {}
    judged |= {"chunks": texts.judged} if texts.judged is not None else {}
    tables["validate"] = {"text": _name(texts.heldout), "ctx": texts.n_ctx, **judged, "baseline": working or "bf16"}
    head = [f"{MADE} at effort {request.effort}. `ggufmill run` makes the same file again of it, to the byte, with the"]
    head += [f"# model and the texts that it names. Size: {fit.why}."]
    return "\n".join([*head, "", toml_text(tables, tuple(tables))])


def _encoder(request: MakeRequest, level: Effort, texts: Texts) -> dict[str, Any]:
    """Keys of [quantize]: the level's effort, or the one below where nothing can be encoded in the order of the model."""
    if level.number < HIGHEST_EFFORT:
        return {"effort": level.number}
    windows = WINDOWS if texts.windows is None else windows_within(texts.windows, texts.n_ctx)
    if find_spec("torch") is None:
        reason = f"the order of the model needs torch ({installation('torch')})"
    else:
        reason = "" if windows else "the text fills no window in the order of the model"
    if reason:
        note(f"note: encoding at effort {HIGHEST_EFFORT - 1}: {reason}")
        return {"effort": HIGHEST_EFFORT - 1}
    if request.tune and not judging(windows).any():
        note(f"note: nothing is tuned: the text fills {windows} windows in the order of the model, and tuning needs 8")
    return {"effort": HIGHEST_EFFORT} | ({"tune": True} if request.tune and judging(windows).any() else {})


def _source(request: MakeRequest, source: TensorSource) -> dict[str, str]:
    """The model, and of a repository the commit that was read."""
    if not is_repository(request.model):
        return {"model": str(Path(request.model).absolute())}
    name, _, revision = str(request.model).partition("@")
    parts = source.files[0].parts if source.files else ()
    if not revision and "snapshots" in parts[:-1]:
        revision = parts[parts.index("snapshots") + 1]
    return {"model": name} | ({"revision": revision} if revision else {})


def _name(text: Path) -> str:
    """A text as the recipe has it."""
    return BUNDLED if text == bundled_text() else str(text.absolute())


def _reading(request: MakeRequest) -> dict[str, Any]:
    """How the source is read, where that was said: key of a recipe -> value."""
    values: dict[str, Any] = {}
    for field in fields_of(SourceOptions):
        value = getattr(request, field.name)
        if field.option.key and value != field.default:
            is_path = field.option.key.partition(".")[2] in PATH_KEYS
            values[field.option.key] = _absolute(value) if is_path else value
    return values


def _absolute(value: Any) -> str | list[str]:
    """Files, FILE or FILE=SCALE, by absolute paths."""
    paths = [str(Path(each).absolute()) for each in ([value] if isinstance(value, str | Path) else value)]
    return paths[0] if len(paths) == 1 else paths
