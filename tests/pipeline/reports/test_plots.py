"""What pictures say beside the lines and colours."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ggufmill.pipeline.reports import plots
from ggufmill.pipeline.reports.plots import draw_map
from ggufmill.runtime.evaluate.bench import Depth


@pytest.mark.parametrize(("errors", "bars"), [((0.0, 0.0), 0), ((5.0, 0.5), 1)])
def test_a_sweep_has_bars_of_error_where_it_was_repeated(tmp_path, monkeypatch, errors, bars):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plots.plot_sweep([Depth(8, 2, n, 1.0, 2.0, *errors) for n in (0, 8)], "a sweep", tmp_path / "sweep.png")
    drawn = [len(axes.containers[0].lines[2]) for axes in figures[0].axes]
    assert drawn == [bars, bars]


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
    bar = draw_map(figure, figure.subplots(), values, ["0", "1"], "tokens", norm=LogNorm(low, high)).colorbar
    figure.canvas.draw()
    assert [label.get_text() for label in bar.ax.get_yticklabels()] == labels
    assert all(low <= tick <= high for tick in bar.get_ticks())
    assert len(bar.get_ticks(minor=True)) == 0
