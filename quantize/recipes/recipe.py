"""Reading recipe files: a text of rules, or TOML with the same text under `[quantize] rules` among other stages of a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...formats import PlanError, TensorType
from ...formats.file_range import read_text
from ...formats.loaders import MLA_LAYOUTS, PROGRAMS
from ...jobs.patterns import NamePattern, PatternError
from ...jobs.plan import parse_size
from .mixes import file_type_name
from .rules import RecipeError, Rule, parse_default, parse_rules, parse_type
from .shell import rules_from_shell
from .variants import RecipeVariant, plain_tables, toml_text, variants


@dataclass(frozen=True)
class Recipe:
    """A recipe as read.

    rules           in order
    text            of the file, unchanged
    stages          the tables of a TOML recipe, every value checked; {} for a text recipe
    type            [quantize] type, for tensors that no rule matches: a file type's name or a type; None: not given
    split_max_size  [quantize] split_max_size, bytes per file; None: one file
    label           what the file's name ends in, where a recipe makes several; '' for the only one
    several         of a recipe that makes several files: the recipe of each, with what all share in `stages`, but no rules and
                    no type; [] for one
    """

    name: str
    rules: list[Rule]
    text: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    type: TensorType | str | None = None
    split_max_size: int | None = None
    label: str = ""
    several: list[Recipe] = field(default_factory=list)

    @property
    def each(self) -> list[Recipe]:
        """The recipe of each file: of several, or itself."""
        return self.several or [self]

    @property
    def outtype(self) -> str | None:
        """[convert] outtype: what no rule takes, as `convert --outtype` has it; None: not given."""
        return self.stages.get("convert", {}).get("outtype")

    @property
    def rules_text(self) -> str:
        """The text of the rules alone, as written in the recipe."""
        return self.stages["quantize"].get("rules", "") if "quantize" in self.stages else rules_from_shell(self.text)


def load_recipe(path: str | Path, *, several: bool = False) -> Recipe:
    """Reads a text or (by its suffix) TOML recipe. several: it may make several files.

    Raises RecipeError for a missing file, for what it cannot understand, and for several files where one is meant.
    """
    path = Path(path)
    try:
        text = read_text(path, "utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: {error.strerror}; `ggufmill recipes list` shows the bundled ones") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {error.strerror if isinstance(error, OSError) else 'not UTF-8 text'}") from None
    return parse_recipe(text, path, is_toml=path.suffix == ".toml", several=several)


def parse_recipe(text: str, path: Path, *, is_toml: bool, several: bool = False) -> Recipe:
    """A recipe of its text; path: as messages call it. Raises RecipeError as `load_recipe`."""
    if not is_toml:
        return Recipe(path.name, parse_rules(rules_from_shell(text), str(path)), text)
    import tomllib

    _check_dots(text, path)
    try:
        stages = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; numbers of thousands of digits; tables nested too deeply
        raise RecipeError(f"{path}: {error}") from None
    files = variants(stages, path)
    recipes = [_recipe_of(file, text, path) for file in files]
    if not files[0].name:
        return recipes[0]
    if not several:
        names = ", ".join(file.name for file in files)
        raise RecipeError(f"{path} is a recipe of several files ({names}), which `ggufmill run` makes; one is wanted here")
    shared = {name: table for name, table in stages.items() if name not in ("quantize", "repack")}
    return Recipe(path.name, [], text, shared, several=recipes)


def _recipe_of(file: RecipeVariant, text: str, path: Path) -> Recipe:
    """The recipe of one file. text: of the whole recipe."""
    _check_stages(file.stages, path)
    stages = plain_tables(file.stages, path)
    quantize = stages.get("quantize", {})
    size = quantize.get("split_max_size")
    return Recipe(
        path.name,
        parse_rules(quantize.get("rules", ""), f"{path}, [quantize] rules"),
        toml_text(stages) if file.name else text,
        stages,
        parse_default(quantize["type"], f"{path}: [quantize] type") if "type" in quantize else None,
        parse_size(size) if isinstance(size, str) else size,
        file.name,
    )


# What dots mean nothing in: strings of TOML and comments.
_TEXT_OF_TOML = r'''(?s)"""(?:\\.|[^\\])*?"""|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*+"|'[^'\n]*+'|#[^\n]*+'''  # compiled if needed
_MAX_DOTS = 64  # in one line; what tomllib takes for a key grows with the square of its parts


def _check_dots(text: str, path: Path) -> None:
    """Raises RecipeError for a line with a dotted key with so many parts that reading it would take gigabytes."""
    bare = re.sub(_TEXT_OF_TOML, lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(bare.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise RecipeError(
                f"{path}: line {number} has {line.count('.')} dots; a key of a recipe has one part: [quantize] type"
            )


# Keys of a TOML recipe with a local path or a list of them, and their strings. Windows separates folders by backslashes too.
PATH_KEYS = ("model", "text", "file", "covariance", "curvature", "sequential", "lora")
_QUOTED = r"""(?:"(?:\\.|[^"\\\n])*+"|'[^'\n]*+')"""
_PATHS = rf"""(?<![\w-])(?:{"|".join(PATH_KEYS)})["']?\s*=\s*(?:{_QUOTED}|\[\s*+(?:{_QUOTED}\s*+,?\s*+)*+\])"""
_FOLDERS = r"""^(["'])(?!hf:).*[/\\](?=[^/\\].)"""


def strip_folders(text: str) -> str:
    """A recipe's text with every local path reduced to its file name, for publishing."""
    return re.sub(_PATHS, lambda paths: re.sub(_QUOTED, lambda path: re.sub(_FOLDERS, r"\1", path[0]), paths[0]), text)


@dataclass(frozen=True)
class KeySpec:
    """A key of a TOML recipe. allowed: its values in words, for errors; accepts: whether a value is one of them."""

    allowed: str
    accepts: Callable[[Any], bool]


def _integer(minimum: int) -> KeySpec:
    return KeySpec(f"a whole number, at least {minimum}", lambda v: type(v) is int and v >= minimum)


def _are_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name != "" for name in names)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_size(value: Any) -> bool:
    try:
        return value > 0 if type(value) is int else isinstance(value, str) and parse_size(value) > 0
    except PlanError:
        return False


def _is_list(value: Any, spec: KeySpec) -> bool:
    return isinstance(value, list) and all(map(spec.accepts, value))


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and value != "" and bool(NamePattern(value))
    except PatternError:
        return False


# Values of [convert] outtype. It applies where no rule of [quantize] matches.
OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")
TARGETS = ("target_size", "target_bpw", "max_kld")  # keys of [quantize] that start a search for types
_TEXT = KeySpec("text", lambda v: isinstance(v, str))
_NAME = KeySpec("text that is not empty", lambda v: isinstance(v, str) and v != "")
_N_CTX = _integer(4)
_COUNT = _integer(1)
_FILE_TYPE = KeySpec("a file type such as 'Q4_K_M'", lambda v: isinstance(v, str) and file_type_name(v) is not None)
_SWITCH = KeySpec("true or false", lambda v: isinstance(v, bool))
_SWITCH_OR_NAME = KeySpec("true, false or a file to write", lambda v: isinstance(v, bool) or _NAME.accepts(v))
_SIZE = KeySpec("a size such as '180G', or a number of bytes", _is_size)
_POSITIVE = KeySpec("a number above 0", lambda v: _is_number(v) and v > 0)
# The stages of a TOML recipe and the keys that each may have.
STAGES: dict[str, dict[str, KeySpec]] = {
    "source": {"model": _NAME, "revision": _NAME, "working": _NAME},
    "convert": {
        "outtype": KeySpec(f"one of {', '.join(OUTTYPES)}", lambda v: v in OUTTYPES),
        "mla_layout": KeySpec(f"one of {', '.join(MLA_LAYOUTS)}", lambda v: v in MLA_LAYOUTS),
        "mtp": _SWITCH,
        "vocab": _SWITCH,
        "architecture": _NAME,
        "allow_lossy_config": _SWITCH,
        "lora": KeySpec("a LoRA adapter's FILE or FILE=SCALE, or a list of them", _are_names),
    },
    "imatrix": {
        "text": KeySpec("a text's FILE or FILE:WEIGHT, or a list of them", _are_names),
        "ctx": _N_CTX,
        "chunks": _COUNT,
        "file": _NAME,
        "covariance": _SWITCH_OR_NAME,
        "covariance_experts": _SWITCH,
        "curvature": _SWITCH_OR_NAME,
        "nextn": _SWITCH,
    },
    "quantize": {
        "type": _NAME,
        "rules": _TEXT,
        "target_size": _SIZE,
        "target_bpw": _POSITIVE,
        "max_kld": _POSITIVE,
        "split_max_size": _SIZE,
        "covariance": _NAME,
        "curvature": _NAME,
        "effort": KeySpec("0, 1, 2, 3 or 4", lambda v: _integer(0).accepts(v) and v <= 4),
        "sequential": _NAME,
        "sequential_chunks": _COUNT,
        "tune": _SWITCH,
        "for": KeySpec(f"one of {', '.join(PROGRAMS)}", lambda v: v in PROGRAMS),
        "name": _NAME,
        "recipe": _NAME,
        "imatrix": _SWITCH,
        "repack": KeySpec("true, false or a regular expression", lambda v: isinstance(v, bool) or _is_regex(v)),
    },
    "search": {
        "text": _NAME,
        "ctx": _N_CTX,
        "chunks": _COUNT,
        "types": _NAME,
        "repacked": _SWITCH,
        "gpu": KeySpec("a regular expression", _is_regex),
        "gpu_size": _SIZE,
        "rows": _integer(8),
        "seed": _integer(0),
        "measurements": _COUNT,
        "refine": _integer(0),
    },
    "repack": {"pattern": _NAME},
    "validate": {
        "text": _NAME,
        "ctx": _N_CTX,
        "chunks": _COUNT,
        "baseline": _NAME,
        "from_chunk": _integer(0),
        "prompt": KeySpec("text, or a list of texts", lambda v: isinstance(v, str) or _is_list(v, _TEXT)),
        "stock": KeySpec("a list of file types such as 'Q4_K_M'", lambda v: _is_list(v, _FILE_TYPE)),
        "n": _COUNT,
        "mtp": _SWITCH,
        "max_ppl_ratio": _POSITIVE,
        "max_kld": KeySpec("a number, at least 0", lambda v: _is_number(v) and v >= 0),
    },
    "report": {"base_model": _NAME, "quantized_by": _NAME, "license": _NAME},
}


_MOMENTS = ("covariance", "curvature")  # keys of files of second moments


def _check_stages(stages: dict[str, Any], path: Path) -> None:
    """Raises RecipeError for stages, keys and values that STAGES does not allow, and for keys that would have no effect."""
    for stage, values in stages.items():
        if stage not in STAGES or not isinstance(values, dict):
            raise RecipeError(f"{path}: [{stage}] is not a stage; stages are {', '.join(STAGES)}")
        specs = STAGES[stage]
        for key, value in values.items():
            if key not in specs:
                raise RecipeError(f"{path}: [{stage}] has no key {key!r}; it may have {', '.join(sorted(specs))}")
            if not specs[key].accepts(value):
                shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
                raise RecipeError(f"{path}: [{stage}] {key} = {shown} has to be {specs[key].allowed}")
    imatrix, validate = stages.get("imatrix", {}), stages.get("validate", {})
    if "text" in imatrix and "file" in imatrix:
        raise RecipeError(f"{path}: [imatrix] has both text and file; give the one to compute from, or the other to read")
    for stage, values in (("imatrix", imatrix), ("validate", validate)):
        unused = [key for key in values if key not in ("text", "file")]
        if unused and "text" not in values:
            raise RecipeError(f"{path}: [{stage}] {unused[0]} needs text = ... beside it, a file to read")
    if "covariance_experts" in imatrix and not imatrix.get("covariance"):
        raise RecipeError(f"{path}: [imatrix] covariance_experts needs covariance = true beside it")
    if stages.get("convert", {}).get("mtp") is False:
        wants = "[imatrix] nextn" if imatrix.get("nextn") else "[validate] mtp" if validate.get("mtp") else ""
        if wants:
            raise RecipeError(f"{path}: {wants} runs the draft layers, which [convert] mtp = false leaves out")
    if stages.get("convert", {}).get("vocab") is False:
        reading = next((stage for stage in ("imatrix", "search", "validate") if "text" in stages.get(stage, {})), None)
        if reading:
            raise RecipeError(f"{path}: [{reading}] text needs the vocabulary, which [convert] vocab = false leaves out")
    moments = [(stage, key) for stage in ("imatrix", "quantize") for key in _MOMENTS if stages.get(stage, {}).get(key)]
    if len(moments) > 1:
        (stage, key), (other_stage, other) = moments[:2]
        if stage != other_stage:
            raise RecipeError(f"{path}: [{stage}] {key} collects what [{other_stage}] {other} reads; give one of the two")
        raise RecipeError(f"{path}: [{stage}] curvature collects the covariances too; give one of the two")
    quantize = stages.get("quantize", {})
    in_order = quantize.get("sequential") or quantize.get("effort") == 4
    needed = {"effort": moments, "sequential": moments, "sequential_chunks": in_order, "tune": in_order}
    for key, needs in needed.items():
        if key in quantize and not needs:
            other = "sequential = ... or effort = 4" if needs is in_order else "covariance or curvature = ..., a file to read,"
            raise RecipeError(f"{path}: [quantize] {key} needs {other} beside it")
    if "outtype" in stages.get("convert", {}):
        conflicting = next((key for key in ("type", *TARGETS) if key in stages.get("quantize", {})), None)
        if conflicting is not None:
            raise RecipeError(f"{path}: [convert] outtype and [quantize] {conflicting} both say what no rule takes is to be")
    _check_search(stages, path)
    if "working" in stages.get("source", {}):
        working = parse_type(stages["source"]["working"], f"{path}: [source] working").name
        if validate and validate.get("baseline", working) != working:
            raise RecipeError(
                f"{path}: [validate] baseline has to be {working}, as [source] working is: the source does not run"
            )
    if "baseline" in validate:
        parse_type(validate["baseline"], f"{path}: [validate] baseline")


def _check_search(stages: dict[str, Any], path: Path) -> None:
    """Raises RecipeError where a target and the keys that belong to it contradict each other or would have no effect."""
    quantize, search = stages.get("quantize", {}), stages.get("search")
    targets = [key for key in TARGETS if key in quantize]
    if len(targets) > 1:
        raise RecipeError(f"{path}: [quantize] has both {targets[0]} and {targets[1]}; give one target")
    if targets and "type" in quantize:
        raise RecipeError(f"{path}: [quantize] {targets[0]} leaves no room for type; give rules for what is fixed")
    if search is None:
        search = {}
    elif not targets:
        raise RecipeError(f"{path}: [search] needs a target: [quantize] {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    unused = [key for key in ("ctx", "chunks", "measurements", "refine") if key in search]
    if unused and "text" not in search:
        raise RecipeError(f"{path}: [search] {unused[0]} needs text = ... beside it, a file to read")
    if "gpu_size" in search and ("gpu" not in search or "max_kld" in quantize):
        raise RecipeError(f"{path}: [search] gpu_size needs gpu beside it, a regex, and [quantize] target_size or target_bpw")
    predicts = quantize.get("curvature") or stages.get("imatrix", {}).get("curvature")
    if "max_kld" in quantize and "text" not in search and not predicts:
        raise RecipeError(
            f"{path}: [quantize] max_kld needs [search] text, a file to measure on, or curvature, which predicts it"
        )
    if search.get("repacked") and "repack" in stages:
        raise RecipeError(f"{path}: [search] repacked and [repack] have the same purpose; give one of the two")
