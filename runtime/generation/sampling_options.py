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
    section: ClassVar[str] = "Sampling"

    temp: float = option(
        "Divide the logits by this; 0 always takes the most probable token.",
        default=0.8,
        least=0,
        json="temperature",
        json_range=(0, 100),
    )
    top_k: int = option("Keep the k most probable tokens; 0 keeps all.", default=40, least=0, json_range=(-1, _MOST_TOKENS))
    top_p: float = option(
        "Keep the most probable tokens that together have this probability (nucleus sampling); 1 keeps all.",
        default=0.95,
        least=0,
        most=1,
        is_above=True,
        json_range=(0, 1),
    )
    min_p: float = option(
        "Keep the tokens that are at least this fraction as probable as the most probable one; 0 keeps all.",
        default=0.05,
        least=0,
        most=1,
    )
    typical_p: float = option(
        "Keep the tokens whose surprise is nearest to the entropy and that together have this probability "
        "(locally typical sampling, arXiv:2202.00666); 1 keeps all.",
        default=1.0,
        flags="--typical --typical-p",
        least=0,
        most=1,
        is_above=True,
        json_range=(1e-6, 1),
        rare=True,
    )
    top_n_sigma: float = option(
        "Keep the tokens whose logit is within this many standard deviations of the largest "
        "(arXiv:2411.07641); 0 or less keeps all.",
        default=-1.0,
        flags="--top-nsigma --top-n-sigma",
        json_range=(-1, 1000),
        rare=True,
    )
    xtc_probability: float = option(
        "Exclude top choices (XTC) with this probability: all tokens above xtc_threshold but the least "
        "probable of them; 0 never does.",
        default=0.0,
        least=0,
        most=1,
        rare=True,
    )
    xtc_threshold: float = option(
        "Count a token as a top choice of XTC from this probability on.", default=0.1, least=0, most=1, rare=True
    )
    dynatemp_range: float = option(
        "Let the temperature follow the entropy of the candidates, from temp minus this to temp plus this; 0 switches it off.",
        default=0.0,
        least=0,
        json_range=(0, 100),
        rare=True,
    )
    dynatemp_exponent: float = option(
        "Raise the entropy, relative to the largest possible, to this exponent for --dynatemp-range.",
        default=1.0,
        flags="--dynatemp-exp",
        least=0,
        json_range=(0, 100),
        rare=True,
    )
    logit_bias: Mapping[int, float] = option(
        "Add to the logit of a token, for example 15043+1 or 15043-inf; repeatable.",
        doc="Token id -> what is added to its logit; -inf: the token is never sampled.",
        default_factory=dict,
        flags="-l --logit-bias",
        kind="token_biases",
        rare=True,
    )
    repeat_penalty: float = option(
        "Divide positive logits of recent tokens by this, and multiply negative ones; 1 switches it off.",
        default=1.0,
        least=0,
        is_above=True,
        json_range=(0.01, 100),
    )
    repeat_last_n: int = option(
        "Count this many tokens as recent, those of the prompt too; -1 counts all.",
        default=64,
        least=-1,
        json_range=(-1, _MOST_TOKENS),
        rare=True,
    )
    presence_penalty: float = option(
        "Subtract this from the logits of recent tokens.", default=0.0, json_range=(-100, 100), rare=True
    )
    frequency_penalty: float = option(
        "Subtract this from the logits of recent tokens once for each occurrence.",
        default=0.0,
        json_range=(-100, 100),
        rare=True,
    )
    dry_multiplier: float = option(
        "Penalise repetitions (DRY, don't repeat yourself): a token that would lengthen a repetition of more "
        "than dry_allowed_length tokens loses this times dry_base to the power of what is beyond that; 0 "
        "switches it off.",
        default=0.0,
        least=0,
        json_range=(0, 1000),
        rare=True,
    )
    dry_base: float = option("Set the base of the DRY penalty.", default=1.75, least=1, json_range=(1, 1000), rare=True)
    dry_allowed_length: int = option(
        "Allow DRY repetitions of this many tokens without a penalty.",
        default=2,
        least=0,
        json_range=(0, _MOST_TOKENS),
        rare=True,
    )
    dry_penalty_last_n: int = option(
        "Search this many tokens for DRY repetitions, those of the prompt too; -1: all, 0: none.",
        default=-1,
        least=-1,
        json_range=(-1, _MOST_TOKENS),
        rare=True,
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        "Let no DRY repetition go across this text; repeatable, in place of the default; `none` stands for no text.",
        doc="Texts that no repetition goes across.",
        default=DEFAULT_BREAKERS,
        flags="--dry-sequence-breaker",
        kind="breakers",
        metavar="TEXT",
        shown='line end, ":", double quote, "*"',
        rare=True,
    )
    mirostat: int = option(
        "Keep the surprise of the tokens near mirostat_tau by this version of Mirostat (arXiv:2007.14966), in"
        " place of filters and penalties; 0 switches it off.",
        default=0,
        least=0,
        most=2,
        rare=True,
    )
    mirostat_tau: float = option(
        "Set the target of Mirostat, in bits of surprise per token.",
        default=5.0,
        flags="--mirostat-ent",
        least=0,
        json_range=(0, 1000),
        rare=True,
    )
    mirostat_eta: float = option(
        "Set how fast Mirostat follows its target.",
        default=0.1,
        flags="--mirostat-lr",
        least=0,
        json_range=(0, 1000),
        rare=True,
    )
    samplers: tuple[str, ...] = option(
        "Apply these samplers in their order, by name, or by llama.cpp's letters (edskypmxt); one that is not"
        " named does nothing.",
        default=DEFAULT_ORDER,
        flags="--samplers --sampling-seq --sampler-seq",
        kind="samplers",
        metavar="NAME;NAME",
        shown=";".join(DEFAULT_ORDER),
        rare=True,
    )
    seed: int | None = option(
        "Sample with this seed: the same seed, prompt and settings give the same text.",
        default=None,
        flags="-s --seed",
        least=0,
        shown="random",
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
