"""Tables fit the terminal; in files and pipes they are as wide as they are."""

import pytest

from ggufmill.cli.display import console

HEADINGS = ("tensor", "shape", "from", "to", "bytes", "rule")
ROW = (
    "blk.10.ffn_down_exps.weight", "7168 x 2048 x 256", "fp8_e4m3", "q6_K", 1_234_567_890,
    "Q4_K_M: ffn_down (the outer eighths of the layers and every third between)",
)  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setattr(console, "_terminal_width", lambda: columns)
    for n in range(1, len(ROW) + 1):
        text = console.table(HEADINGS[:n], [ROW[:n]] * 3)
        if "\n\n" not in text:  # a paragraph for each row: nothing can be aligned wrong
            assert max(map(len, text.splitlines())) <= columns, text
            assert len(text.splitlines()) == 5
        assert "1,234,567,890" in text or n < 5


def test_numbers_are_never_cut_and_wide_tables_become_paragraphs(monkeypatch):
    monkeypatch.setattr(console, "_terminal_width", lambda: 80)
    figures = [tuple(123456.789 + i for i in range(12))]
    text = console.table([f"figure {i}" for i in range(12)], figures)
    assert text.splitlines()[0] == "figure 0   123456.7890"
    assert text.splitlines()[11] == "figure 11  123467.7890"


def test_pipes_get_everything():
    assert ROW[-1] in console.table(HEADINGS, [ROW])
