"""What sampling can be asked for: a field is an option of the command line, a keyword of the library and a field of a server's
request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ...errors import PlanError
from ...request_fields import fields_of, option, request

DEFAULT_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_LETTERS = dict(zip("edskypmxt", DEFAULT_ORDER, strict=True))  # of llama.cpp's --sampling-seq
_OTHER_NAMES = {
    "typical_p": "typ_p",
    "typical": "typ_p",
    "temp": "temperature",
    "nucleus": "top_p",
    "top_nsigma": "top_n_sigma",
}
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_SAMPLERS = 16
MAX_BREAKER = 40  # characters of a sequence breaker
_MOST_TOKENS = 1 << 30


def parse_samplers(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names of samplers in their order. given: names, separated by ; if it is one text, or the letters of --sampling-seq.

    Raises PlanError for a name or a letter that is not known, and for more than MAX_SAMPLERS: each goes through all tokens.
    """
    names_of_one = {*DEFAULT_ORDER, *_OTHER_NAMES}
    if isinstance(given, str) and given not in names_of_one and not set(given) - _LETTERS.keys():
        names = [_LETTERS[letter] for letter in given[: MAX_SAMPLERS + 1]]
    else:
        names = [name for name in given.split(";") if name.strip()] if isinstance(given, str) else list(given)
    if len(names) > MAX_SAMPLERS:
        raise PlanError(f"there are {MAX_SAMPLERS} samplers at most")
    names = [name.strip().replace("-", "_") for name in names]
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in DEFAULT_ORDER:
            raise PlanError(f"{name[:40]!r} is not a sampler; there are {', '.join(DEFAULT_ORDER)}")
    return tuple(names)


@request
class Sampling:
    """Sampling settings; names, defaults and order are llama.cpp's: logit_bias, penalties, DRY, top_n_sigma, top_k,
    typical_p, top_p, min_p, XTC, temperature. With mirostat only logit_bias and temp count with it. Where a model's file
    recommends a value (general.sampling.*), it takes the place of the default."""

    reference: ClassVar[str] = "Fields of `Sampling`"

    temp: float = option(
        "Divides the logits; 0: always the most probable token.", default=0.8, least=0, json="temperature", json_range=(0, 100)
    )
    top_k: int = option("Keep the k most probable tokens; 0: all.", default=40, least=0, json_range=(-1, _MOST_TOKENS))
    top_p: float = option(
        "Nucleus sampling: keep the most probable tokens that together have this probability; 1: all.",
        default=0.95,
        least=0,
        most=1,
        is_above=True,
        json_range=(0, 1),
    )
    min_p: float = option(
        "Keep tokens at least this fraction as probable as the most probable one; 0: all.", default=0.05, least=0, most=1
    )
    typical_p: float = option(
        "Locally typical sampling (arXiv:2202.00666): keep the tokens whose surprise is nearest to the entropy and that "
        "together have this probability; 1: all.",
        default=1.0,
        flags="--typical --typical-p",
        least=0,
        most=1,
        is_above=True,
        json_range=(1e-6, 1),
    )
    top_n_sigma: float = option(
        "Keep tokens whose logit is within this many standard deviations of the largest (arXiv:2411.07641); 0 or less: all.",
        default=-1.0,
        flags="--top-nsigma --top-n-sigma",
        json_range=(-1, 1000),
    )
    xtc_probability: float = option(
        "Exclude top choices: how often all tokens above xtc_threshold but the least probable of them are excluded; 0: never.",
        default=0.0,
        least=0,
        most=1,
    )
    xtc_threshold: float = option("Probability from which on a token counts for that.", default=0.1, least=0, most=1)
    dynatemp_range: float = option(
        "The temperature follows the entropy of the candidates, from temp minus this to temp plus this; 0: off.",
        default=0.0,
        least=0,
        json_range=(0, 100),
    )
    dynatemp_exponent: float = option(
        "Exponent of the entropy, relative to the largest possible, in that.",
        default=1.0,
        flags="--dynatemp-exp",
        least=0,
        json_range=(0, 100),
    )
    logit_bias: Mapping[int, float] = option(
        "Added to the logit of a token, such as 15043+1 or 15043-inf; repeatable.",
        doc="Token id -> what is added to its logit; -inf: the token is never sampled.",
        default_factory=dict,
        flags="-l --logit-bias",
        kind="token_biases",
    )
    repeat_penalty: float = option(
        "Positive logits of recent tokens are divided by this, negative ones multiplied; 1: off.",
        default=1.0,
        least=0,
        is_above=True,
        json_range=(0.01, 100),
    )
    repeat_last_n: int = option(
        "Tokens that count as recent, those of the prompt too; -1: all.",
        default=64,
        least=-1,
        json_range=(-1, _MOST_TOKENS),
    )
    presence_penalty: float = option("Is subtracted from recent tokens' logits.", default=0.0, json_range=(-100, 100))
    frequency_penalty: float = option(
        "Is subtracted from recent tokens' logits once for each occurrence.", default=0.0, json_range=(-100, 100)
    )
    dry_multiplier: float = option(
        "DRY (don't repeat yourself): a token that would lengthen a repetition of more than dry_allowed_length tokens loses "
        "this times dry_base to the power of what is beyond that; 0: off.",
        default=0.0,
        least=0,
        json_range=(0, 1000),
    )
    dry_base: float = option("Base of that penalty.", default=1.75, least=1, json_range=(1, 1000))
    dry_allowed_length: int = option(
        "Tokens of a repetition that cost nothing.", default=2, least=0, json_range=(0, _MOST_TOKENS)
    )
    dry_penalty_last_n: int = option(
        "Tokens that are searched for repetitions, those of the prompt too; -1: all, 0: none.",
        default=-1,
        least=-1,
        json_range=(-1, _MOST_TOKENS),
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        "No repetition goes across this text; repeatable, in place of the default; none: no text.",
        doc="Texts that no repetition goes across.",
        default=DEFAULT_BREAKERS,
        flags="--dry-sequence-breaker",
        kind="breakers",
        metavar="TEXT",
        shown='line end, ":", double quote, "*"',
    )
    mirostat: int = option(
        "Mirostat of this version (arXiv:2007.14966), in place of filters and penalties, keeps the surprise of the tokens near "
        "mirostat_tau; 0: off.",
        default=0,
        least=0,
        most=2,
    )
    mirostat_tau: float = option(
        "Target of Mirostat: bits of surprise per token.", default=5.0, flags="--mirostat-ent", least=0, json_range=(0, 1000)
    )
    mirostat_eta: float = option(
        "How fast Mirostat follows its target.", default=0.1, flags="--mirostat-lr", least=0, json_range=(0, 1000)
    )
    samplers: tuple[str, ...] = option(
        "Samplers in their order, by name, or by llama.cpp's letters (edskypmxt); one that is not named does nothing.",
        default=DEFAULT_ORDER,
        flags="--samplers --sampling-seq --sampler-seq",
        kind="samplers",
        metavar="NAME;NAME",
        shown=";".join(DEFAULT_ORDER),
    )
    seed: int | None = option(
        "The same seed, prompt and settings give the same text.", default=None, flags="-s --seed", least=0, shown="random"
    )

    def __post_init__(self) -> None:
        """Raises PlanError for a value outside its range."""
        for name, type, default, limits in fields_of(Sampling):
            value = getattr(self, name)
            if not type.startswith(("int", "float")) or (value is None is default):
                continue
            low = -math.inf if limits.least is None else limits.least
            high = math.inf if limits.most is None else limits.most
            if not (low <= value <= high and math.isfinite(value)) or (value == low and limits.is_above):
                raise PlanError(f"sampling cannot work with {name} = {value}")
        if self.mirostat not in (0, 1, 2):
            raise PlanError(f"sampling cannot work with mirostat = {self.mirostat}: there are versions 1 and 2")
        object.__setattr__(self, "samplers", parse_samplers(self.samplers))
        for text in self.dry_sequence_breakers:
            if not 0 < len(text) <= MAX_BREAKER:
                raise PlanError(f"a sequence breaker of DRY has to have 1 to {MAX_BREAKER} characters, not {len(text)}")
        for token, bias in self.logit_bias.items():
            if not bias < math.inf:
                raise PlanError(f"sampling cannot work with logit_bias = {bias} for token {token}")
