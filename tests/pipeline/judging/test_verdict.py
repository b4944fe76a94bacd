"""Sentences about which model is better."""

import pytest

from ggufmill.pipeline.judging.verdict import PairedTest, compare_neighbours
from ggufmill.runtime.evaluate.paired import Paired


@pytest.mark.parametrize("windows", [2, 4, 5, 6, 20])
def test_few_windows_cannot_show_a_difference_and_the_sentence_says_so(windows):
    better = [0.01 + 1e-4 * i for i in range(windows)]
    worse = [kld + 0.02 + 1e-5 * i for i, kld in enumerate(better)]  # in every window
    results = [(name, {"kld_mean": sum(k) / windows, "window_klds": k}) for name, k in (("a", better), ("b", worse))]
    (found,) = compare_neighbours(results)
    assert found.is_sure == (windows >= 6)
    assert found.text.endswith("; fewer than 6 windows cannot show one") == (windows < 6)


def test_a_sentence_begins_with_the_name_as_it_is():
    sure, unsure = Paired(-0.5, 0.1, 1e-4, 1e-4, 16), Paired(0.0, 0.0, 1.0, 1.0, 16)
    assert PairedTest("demo-q4", "demo-q3", sure).sentence.startswith("demo-q4 is better than demo-q3 by 0.5")
    said = PairedTest("demo-q4", "copy", unsure).sentence
    assert said.startswith("No difference between demo-q4 and copy is certain: 0 ± 0")
