"""What several models' figures of the same windows say: who is better than whom, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...data_classes import dataclass
from ...runtime.evaluate.paired import Paired, paired

_LEAST_WINDOWS = 6  # the Wilcoxon test of n windows has p of 2^(1 - n) at least
SURE = 0.05  # a difference that chance would make less often than this is told as one


@dataclass(frozen=True)
class NoiseFloor:
    """What the baseline itself differs by when its activations are rounded to bf16: smaller differences mean nothing."""

    kld_mean: float
    kld_error: float | None
    kld_median: float | None
    kld_confident: float | None
    top1_agreement: float

    @classmethod
    def of(cls, figures: dict[str, Any]) -> NoiseFloor:
        """figures: a `Perplexity` as JSON."""
        return cls(*(figures.get(name) for name in cls.__dataclass_fields__))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PairedTest:
    """The model with the smaller KL divergence, the other, and a paired test of the two by window."""

    better: str
    worse: str
    test: Paired

    @property
    def is_sure(self) -> bool:
        """Whether both tests find a difference."""
        return max(self.test.p, self.test.p_wilcoxon) < SURE

    @property
    def sentence(self) -> str:
        """`text` as a sentence, which may begin with a model's name as it is."""
        return self.text if self.is_sure else f"N{self.text[1:]}"

    @property
    def text(self) -> str:
        """'A is better than B by 0.0021 ± 0.0003 (p = 2e-06, 40 windows)'."""
        test, p = self.test, max(self.test.p, self.test.p_wilcoxon)
        figures = f"{abs(test.difference):.2g} ± {test.error:.1g} (p = {p:.1g}, {test.windows} windows)"
        if self.is_sure:
            return f"{self.better} is better than {self.worse} by {figures}"
        few = f"; fewer than {_LEAST_WINDOWS} windows cannot show one" if test.windows < _LEAST_WINDOWS else ""
        return f"no difference between {self.better} and {self.worse} is certain: {figures}{few}"


def compare_neighbours(results: Sequence[tuple[str, dict[str, Any]]]) -> list[PairedTest]:
    """Each of the models, by rising KL divergence, with the next one. results: names and figures, of which those count that
    have a KL divergence by window."""
    ordered = sorted(((n, r) for n, r in results if r.get("window_klds")), key=lambda pair: (pair[1]["kld_mean"], pair[0]))
    found = []
    for (better, first), (worse, second) in pairwise(ordered):
        test = paired(first["window_klds"], second["window_klds"])
        if test is not None:
            found.append(PairedTest(better, worse, test))
    return found


def verdict(results: Sequence[tuple[str, dict[str, Any]]], noise: NoiseFloor | None) -> str:
    """One sentence: the best, how far above the noise it is, and whether it is better than the next. '' without results."""
    if not results:
        return ""
    name, best = min(results, key=lambda pair: (pair[1]["kld_mean"], pair[0]))
    error = best.get("kld_error")
    text = f"{name} has {'the smallest KL divergence' if len(results) > 1 else 'a KL divergence'} of {best['kld_mean']:.4g}"
    text += f" ± {error:.1g}" if error is not None else ""
    if noise is not None and noise.kld_mean > 0:
        times = best["kld_mean"] / noise.kld_mean
        text += f", {times:.1f} times the noise floor" if times > 1 else ", which is not above the noise floor"
    comparisons = compare_neighbours(results)
    if comparisons and comparisons[0].better == name:
        first = comparisons[0]
        text += f"; {first.text}"
        if first.is_sure and noise is not None and -first.test.difference < noise.kld_mean:
            text += ", which is less than the noise floor"
    return f"{text}."
