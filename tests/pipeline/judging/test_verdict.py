"""Sentences about which model is better."""

import pytest

from ggufmill.pipeline.judging.verdict import compare_neighbours


@pytest.mark.parametrize("windows", [2, 4, 5, 6, 20])
def test_few_windows_cannot_show_a_difference_and_the_sentence_says_so(windows):
    better = [0.01 + 1e-4 * i for i in range(windows)]
    worse = [kld + 0.02 + 1e-5 * i for i, kld in enumerate(better)]  # in every window
    results = [(name, {"kld_mean": sum(k) / windows, "window_klds": k}) for name, k in (("a", better), ("b", worse))]
    (found,) = compare_neighbours(results)
    assert found.is_sure == (windows >= 6)
    assert found.text.endswith("; fewer than 6 windows cannot show one") == (windows < 6)
