"""What pictures say beside the lines and colours."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ggufmill.pipeline.reports.imatrix_plots import _map


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1, 40960, ["1", "10", "100", "1,000", "10,000"]),
        (3, 700, ["5", "10", "20", "50", "100", "200", "500"]),
        (10240, 10960, ["10,400", "10,600", "10,800"]),
        (1, 2, ["1", "2"]),
    ],
)
def test_the_bar_of_a_logarithmic_map_has_readable_labels_within_its_range(low, high, labels):
    figure = Figure()
    values = np.array([[float(low)], [float(high)]])
    bar = _map(figure, figure.subplots(), values, ["0", "1"], "tokens", norm=LogNorm(low, high)).colorbar
    figure.canvas.draw()
    assert [label.get_text() for label in bar.ax.get_yticklabels()] == labels
    assert all(low <= tick <= high for tick in bar.get_ticks())
    assert len(bar.get_ticks(minor=True)) == 0
