"""The config.json of a GGUF's model: the one from which the conversion makes the GGUF's metadata and tensors.

The conversion runs with a config that is answered from the file (`GgufConfig`); what it makes is held against the file, and
open questions (switches, words, which of two numbers) are answered otherwise as long as the difference shrinks. So there is
one table of names and transforms, that of the conversion, and what is found has been checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import FormatError, PlanError
from ...formats import TensorSource
from ...formats.loaders import MLA_LAYOUTS
from ..architectures.registry import ARCHITECTURES, architecture_function
from ..config import Config
from ..draft_layers import with_draft_layers
from ..model_spec import ModelSpec
from ..tensor_spec import TensorSpec
from .config_keys import CHOICES
from .facts import Facts, plain
from .gguf_config import Answers, GgufConfig
from .inverse import made_shape
from .sentence_modules import sentence_modules

_SKIPPED = "multimodal."  # functions that only open another model's section
# tensors that the conversion takes under this name, but that the model's own code does not read
_UNREAD = {"GraniteMoeForCausalLM": ("ffn_gate_shexp.", "ffn_up_shexp.")}
_STACKED = ("Mistral4ForCausalLM",)  # of which transformers reads experts in stacks only
_NEAREST = 2  # conversions of which pairs of answers are tried
_PAIRS = 400  # pairs of open questions that are tried where no single answer helps


@dataclass
class ConfigDifference:
    """Between the GGUF that a config gives and the one at hand.

    missing   names of tensors that the file has and the conversion does not make
    absent    tensors that the conversion makes and the file does not have
    misshapen names of those with another shape or, where they are computed, other values
    other     metadata keys with another value; `unsaid`: that the conversion does not write; `added`: that it alone writes
    """

    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all tensors are there."""
        return not (self.missing or self.absent or self.misshapen)

    @property
    def score(self) -> int:
        """0 for none; tensors weigh more than keys."""
        tensors = len(self.missing) + len(self.absent) + len(self.misshapen)
        return 8 * tensors + 3 * len(self.other) + 2 * len(self.unsaid) + 2 * len(self.added)


@dataclass(frozen=True)
class FoundConfig:
    """values: of config.json, with `architectures`; model: what the conversion makes of it, of the file's tensors; difference:
    what is left between them and the file; layout: of latent attention."""

    values: dict[str, Any]
    model: ModelSpec
    difference: ConfigDifference
    layout: str


@dataclass(frozen=True)
class _Try:
    """One run of a conversion. score: of the difference, and how many answers are not the likeliest; progress: keys asked for,
    where it failed."""

    name: str
    layout: str
    answers: Answers
    model: ModelSpec | None
    difference: ConfigDifference
    error: str
    asked: int

    @property
    def rank(self) -> tuple[int, int, int]:
        if self.model is None:
            return (1, -self.asked, 0)
        words = sum(number > 0 and place[-1] in CHOICES for place, number in self.answers.chosen.items())
        return (0, self.difference.score, words)


def find_config(source: TensorSource) -> FoundConfig:
    """Raises FormatError where no conversion makes the file's tensors, naming the nearest and what is missing."""
    with TemporaryDirectory() as folder:  # the conversion of an embedding model reads files beside its config.json
        for name, data in sentence_modules(source).items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return _found(source, Facts(source, Path(folder)))


def _found(source: TensorSource, facts: Facts) -> FoundConfig:
    has_layouts = facts.key("attention.kv_lora_rank") or facts.key("attention.indexer.head_count")
    layouts = MLA_LAYOUTS if has_layouts else ("ik",)
    order = [*ARCHITECTURES]
    first: list[_Try] = []
    for name, function in ARCHITECTURES.items():
        if function.startswith(_SKIPPED) or _is_unread(facts, name):
            continue
        for layout in layouts:
            tried = _attempt(facts, name, layout, {})
            if tried.model is None or tried.model.architecture == facts.architecture:
                first.append(tried)
    started = [each for each in first if each.model is not None]
    best: list[_Try] = []
    for group in (started, [each for each in first if each.model is None]):
        perfect = (0, 0, 0)
        for each in sorted(group, key=lambda tried: (tried.rank != perfect, order.index(tried.name))):
            found = _improved(facts, each)
            if found.model is not None and found.model.architecture == facts.architecture:
                best.append(found)
            if found.rank == perfect:
                break
        nearest = sorted(best, key=lambda tried: (*tried.rank, order.index(tried.name)))[:_NEAREST]
        if not any(each.rank == perfect for each in best):
            best += [_improved(facts, each, pairs=True) for each in nearest]
        if any(each.difference.is_complete for each in best):
            break
    if not best:
        nearest = max(first, key=lambda tried: tried.asked, default=None)
        why = "" if nearest is None else f"; as {nearest.name}: {nearest.error.partition(': ')[2] or nearest.error}"
        raise FormatError(
            f"{source.path}: no checkpoint is known that becomes a GGUF of {facts.architecture or 'no name'}{why}"
        )
    chosen = min(best, key=lambda tried: (*tried.rank, order.index(tried.name)))
    assert chosen.model is not None
    model = chosen.model
    if chosen.name in _STACKED:
        model = replace(model, tensors=[_stacked(spec) for spec in model.tensors])
    return FoundConfig(_values(facts, chosen), model, chosen.difference, chosen.layout)


def _is_unread(facts: Facts, name: str) -> bool:
    """Whether the model's own code of this name does not read what the file has, though the conversion takes it."""
    if name == "MistralForCausalLM" and facts.key("attention.sliding_window_pattern"):
        return True  # all of its layers have a window
    return any(facts.has(i, *_UNREAD.get(name, ("-",))) for i in range(facts.n_layers))


def _stacked(spec: TensorSpec) -> TensorSpec:
    """A stack of experts from one tensor of the checkpoint, where the conversion reads them one by one first."""
    one = spec.alternative
    return one if one is not None and len(spec.sources) > 1 and len(one.sources) == 1 else spec


def _attempt(facts: Facts, name: str, layout: str, chosen: dict[tuple[str, ...], int]) -> _Try:
    answers = Answers(facts, dict(chosen))
    config = GgufConfig(answers, replaced={"architectures": [name]})
    try:
        model = architecture_function(name)(config, layout)
        if model.architecture != facts.architecture:
            return _Try(name, layout, answers, model, ConfigDifference(), "", len(config.asked))
        model = _with_drafts(facts, model)
        return _Try(name, layout, answers, model, compare(facts, model), "", len(config.asked))
    except (FormatError, PlanError) as error:
        return _Try(name, layout, answers, None, ConfigDifference(), str(error), len(config.asked))
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, OverflowError) as error:
        # a wrong candidate may be of another type than the conversion expects of a file
        return _Try(name, layout, answers, None, ConfigDifference(), repr(error), len(config.asked))


def _improved(facts: Facts, tried: _Try, *, pairs: bool = False) -> _Try:
    """Other answers to open questions, one at a time, with `pairs` then two, as long as that brings the result nearer."""
    best, going = tried, True
    while going and (best.model is None or best.difference.score):
        going = False
        for chosen in (*_single(best), *(_double(best) if pairs else ())):
            other = _attempt(facts, best.name, best.layout, chosen)
            if other.model is None and best.model is not None:
                other = _with_new_questions(facts, best, other)
            if other.model is not None and other.model.architecture != facts.architecture:
                continue
            if other.rank < best.rank:
                best, going = other, True
                break
    return best


def _with_new_questions(facts: Facts, best: _Try, failed: _Try) -> _Try:
    """An answer that raised further questions, and failed on their likeliest answers, with others."""
    for place, count in failed.answers.open.items():
        for number in range(1, count) if place not in best.answers.open else ():
            other = _attempt(facts, best.name, best.layout, failed.answers.chosen | {place: number})
            if other.rank < best.rank:
                return other
    return failed


def _single(tried: _Try) -> Iterator[dict[tuple[str, ...], int]]:
    places = [*tried.answers.open]
    for place in reversed(places) if tried.model is None else places:
        now = tried.answers.chosen.get(place, 0)
        for number in range(tried.answers.open[place]):
            if number != now:
                yield tried.answers.chosen | {place: number}


def _double(tried: _Try) -> Iterator[dict[tuple[str, ...], int]]:
    open_places = [place for place, count in tried.answers.open.items() if count > 1]
    count = 0
    for one, two in combinations(open_places, 2):
        for a in range(tried.answers.open[one]):
            for b in range(tried.answers.open[two]):
                count += 1
                if count > _PAIRS:
                    return
                yield tried.answers.chosen | {one: a, two: b}


def _with_drafts(facts: Facts, model: ModelSpec) -> ModelSpec:
    """The model with the draft layers that the file has."""
    if model.draft is None or not facts.n_draft:
        return replace(model, draft=None)
    present = {
        source
        for layer in model.draft.layers
        for tensor in (*layer.tensors, *layer.optional)
        if tensor.name in facts.source.tensors
        for source in tensor.sources
    }
    return with_draft_layers(model, present, keep=True)


def compare(facts: Facts, model: ModelSpec) -> ConfigDifference:
    """What the conversion makes, held against the file."""
    difference, tensors = ConfigDifference(), facts.source.tensors
    made = {spec.name: spec for spec in model.tensors}
    difference.missing = [name for name in tensors if name not in made and not _belongs(name, made)]
    for name, spec in made.items():
        there = tensors.get(name)
        if there is None:
            if not spec.is_optional and spec.sources:
                difference.absent.append(name)
            elif not spec.sources:
                difference.misshapen.append(name)
        elif made_shape(spec) != there.shape or not _same_values(facts, spec):
            difference.misshapen.append(name)
    values = {**model.metadata, **dict.fromkeys((*model.stored_values, *model.stored_integers))}
    whole = facts.source.metadata
    for key, value in (facts.metadata | {key: whole[key] for key in values if key in whole}).items():
        if key not in values:
            difference.unsaid.append(key)
        elif key not in model.stored_values and key not in model.stored_integers and not _same(value, values[key]):
            difference.other.append(key)
    difference.added = [key for key in values if key not in whole]
    return difference


def _belongs(name: str, made: dict[str, TensorSpec]) -> bool:
    """Whether a tensor is a factor of another one's weights, which reading it applies."""
    return any(name.endswith(end) and f"{name.removesuffix(end)}.weight" in made for end in (".scale", ".input_scale"))


def _same_values(facts: Facts, spec: TensorSpec) -> bool:
    if spec.sources:
        return True
    tensor = facts.source.tensors[spec.name]
    made = spec.transform(spec.name, [])
    return np.array_equal(made.read(0, made.n_rows), tensor.read(0, tensor.n_rows))


def _same(a: Any, b: Any) -> bool:
    one, other = plain(a), plain(b)
    if isinstance(one, list) != isinstance(other, list):
        return False
    return one == other


def _values(facts: Facts, tried: _Try) -> dict[str, Any]:
    """config.json of a run: what came from the file, and what the conversion takes for granted, as far as saying it changes
    nothing."""
    values: dict[str, Any] = {"architectures": [tried.name]}
    for place, value in tried.answers.given.items():
        _put(values, place, value)
    if not _agrees(facts, tried, values):
        return values
    for place, value in tried.answers.assumed.items():
        if place in tried.answers.given or not _is_plain(value):
            continue
        more = _copied(values)
        _put(more, place, value)
        if _agrees(facts, tried, more):
            values = more
    plainer = values | _neutral(values, tried)
    if any(isinstance(each, dict) for each in (values.get("rope_parameters") or {}).values()):
        for key in ("rope_theta", "partial_rotary_factor"):  # sets for each kind of layer have their own
            plainer.pop(key, None)
    return plainer if _agrees(facts, tried, plainer) else values


def _neutral(values: dict[str, Any], tried: _Try) -> dict[str, Any]:
    """What a config.json has to say because its readers assume something else where it says nothing."""
    asked = {place[0] for place in (*tried.answers.open, *tried.answers.assumed, *tried.answers.asked) if len(place) == 1}
    unsaid: dict[str, Any] = {
        key: None
        for key in ("q_lora_rank", "sliding_window", "clip_qkv", "attention_value_scale")
        if key in asked and not values.get(key)
    }
    unsaid |= {key: None for key in ("attn_logit_softcapping", "final_logit_softcapping") if values.get(key) == 0}
    if values.get("n_group") == 1:
        unsaid["topk_group"] = 1
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        unsaid["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    nope, rotated = values.get("qk_nope_head_dim"), values.get("qk_rope_head_dim")
    if nope and rotated and "head_dim" not in values:
        unsaid |= {"qk_head_dim": nope + rotated}
        unsaid |= {"head_dim": nope + rotated if tried.name == "Mistral4ForCausalLM" else rotated}
    return unsaid


def _agrees(facts: Facts, tried: _Try, values: dict[str, Any]) -> bool:
    """Whether a config.json with these values gives what the run gave."""
    config = Config(facts.folder / "config.json", values, losses=[])
    try:
        model = _with_drafts(facts, architecture_function(tried.name)(config, tried.layout))
    except (FormatError, PlanError, TypeError, ValueError, KeyError):
        return False
    return compare(facts, model).score == tried.difference.score


def _put(values: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for name in place[:-1]:
        values = values.setdefault(name, {})
    values[place[-1]] = value


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in values.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float) or (isinstance(value, list) and all(map(_is_plain, value)))
