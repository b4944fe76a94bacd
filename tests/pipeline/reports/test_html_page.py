"""The report as people see it: what it publishes, and how its page looks in a narrow window."""

import re
import shutil

import pytest

from ggufmill.pipeline.reports.html_page import marked_texts, page_text
from ggufmill.pipeline.reports.labels import label_boxes
from ggufmill.pipeline.reports.markdown import recipe_shown, texts_shown
from ggufmill.pipeline.reports.svg import Series, bars, heat_map, lines

TYPES = [
    *("iq4_kss", "iq4_k_r4", "iq3_k", "iq2_kl", "iq5_ks", "iq5_k_r4", "q8_0", "iq6_k"),
    *("f32", "iq2_k_r4", "iq4_ks", "q5_0", "q6_0", "iq4_nl", "iq3_ks", "iq2_ks_r4"),
]


VALIDATION = {
    **{"perplexity": 12.3, "error": 0.4, "baseline": "bf16", "baseline_perplexity": 12.0, "ratio": 1.025, "ratio_error": 0.005},
    **{"kld_median": 0.01, "kld_p99": 0.1, "kld_max": 0.5},
    **{"kld_mean": 0.02, "kld_error": 0.001, "top1_agreement": 95.0, "top1_error": 0.3, "n_ctx": 512, "chunks": 3},
    **{
        "dataset": "held.txt",
        "baseline_bytes": 1 << 40,
        "baseline_bits": 16.0,
        "tokens_per_second": 100.0,
        "tokens_scored": 768,
    },
    "running": {
        **{"perplexity": [11.0, 12.0, 12.3], "baseline_perplexity": [10.9, 11.8, 12.0], "kld_mean": [0.01, 0.02, 0.02]},
        **{"error": [2.0, 0.6, 0.4], "ratio_error": [0.02, 0.01, 0.005], "kld_error": [0.003, 0.002, 0.001]},
    },
    "texts": [{"prompt": "The list", "baseline": "is sorted down", "result": "is sorted up"}],
}


@pytest.fixture
def report():
    """The report of a run with many types."""
    sizes = {name: (i + 1) << 30 for i, name in enumerate(TYPES)}
    roles = {"routed experts": sizes, "feed forward": dict(list(sizes.items())[:9]), "norms": {"f32": 1 << 20}}
    total = sum(sum(types.values()) for types in roles.values())
    return {
        **{
            "recipe": "all.toml",
            "name": "Demo 3B",
            "failures": [],
            "source": "model (9 tensors, 300.000 GiB of weights)",
            "made": "2026-01-01",
        },
        **{"version": "1", "machine": "Linux", "file_bytes": total, "total_bytes": total, "bits_per_weight": 4.5, "tensors": 9},
        **{"weights": 10**9, "validation": None, "warnings": [], "search": None, "table": [], "coverage": None, "rules": ""},
        "limits": {},
        **{"label": "", "stock": [], "is_stock": False},
        "types": {name: {"tensors": 100, "nbytes": n} for name, n in sizes.items()},
        "roles": roles,
        "seconds": {"quantize": 100.0, "verify": 3.0},
    }


def test_of_local_paths_only_the_names_are_published():
    text = """# model = "/home/me/old"
[source]
model = "/home/me/models/V3/"
[imatrix]
file='../o"k/v3.imatrix'
[validate]
text = "/home/o'k/held out.txt"  # far/away
[report]
base_model = "OWNER/V3"
"""
    shown = """# model = "old"
[source]
model = "V3/"
[imatrix]
file='v3.imatrix'
[validate]
text = "held out.txt"  # far/away
[report]
base_model = "OWNER/V3"
"""
    assert recipe_shown({"rules": text}) + "\n" == shown
    for same in ('source.model = "hf:OWNER/V3"', 'validate = {text = "a.txt"}', "rules = 'a/b=q8_0'"):
        assert recipe_shown({"rules": same}) == same
    assert recipe_shown({"rules": 'validate = {text = "/x/a.txt", n = 1}'}) == 'validate = {text = "a.txt", n = 1}'
    assert texts_shown({"imatrix_texts": ["/home/me/a.txt", "wiki/test"]}) == "a.txt, wiki/test"


def test_no_two_types_look_the_same():
    drawing = bars([("all", [(name, 1.0) for name in TYPES])], TYPES)
    squares = re.findall(r'(<rect [^>]*width="10.0"[^>]*height="10".*?)<text[^>]*>(.*?)</text>', drawing)
    assert [name for _, name in squares] == TYPES
    looks = [re.sub(r' x="[^"]*"| y="[^"]*"', "", square) for square, _ in squares]
    assert len(set(looks)) == len(TYPES)


def test_the_page_is_titled_by_the_model(report):
    page = page_text(report)
    assert "<title>Demo 3B</title>" in page
    assert "<h1>Demo 3B</h1>" in page
    assert "by the recipe all.toml" in page


def test_weights_are_a_heat_map_of_layers_and_tensors(report):
    figures = {"role": "", "rule": "", "nbytes": 1, "type": "q4_0"}
    matrix = {**figures, "name": "blk.2.ffn_up.weight", "layer": 2, "kind": "ffn_up", "shape": [64, 32]}
    norm = {
        **figures,
        "name": "blk.2.attn_norm.weight",
        "layer": 2,
        "kind": "attn_norm",
        "shape": [64],
        "bits": 32.0,
        "error": 0,
    }
    first = matrix | {"name": "blk.0.ffn_up.weight", "layer": 0, "bits": 8.5, "error": 0.01}
    infinite = matrix | {"kind": "ffn_down", "bits": 4.5, "error": float("inf"), "name": "blk.2.ffn_down.weight"}
    assert "blk.2.ffn_down.weight: q4_0, error" not in page_text(report | {"table": [first, infinite]})
    page = page_text(report | {"table": [first, matrix | {"bits": 4.5, "error": 0.08}, norm]})
    texts = re.findall(r"<title>(blk[^<]*)</title>", page)
    assert texts == [
        *("blk.0.ffn_up.weight: q4_0, 8.5 bits per weight", "blk.2.ffn_up.weight: q4_0, 4.5 bits per weight"),
        *("blk.0.ffn_up.weight: q4_0, error 0.01000", "blk.2.ffn_up.weight: q4_0, error 0.08000"),
    ]
    drawing = heat_map({("a", 0): (8.0, "x"), ("a", 2): (4.0, "y"), ("b", 1): (2.0, "z")}, "layer")
    cells = re.findall(r'<rect x="([\d.]+)" y="(\d+)"[^>]*fill-opacity="([\d.]+)"><title>(\w)', drawing)
    assert [(int(y), float(depth), text) for _, y, depth, text in cells] == [(0, 1.0, "x"), (0, 0.55, "y"), (14, 0.1, "z")]
    columns = [float(x) for x, *_ in cells]
    assert columns[0] < columns[2] < columns[1]
    assert re.findall(r">([\d.]+)</text>", drawing)[-3:] == ["2", "4", "8"]
    many = heat_map({("a", i): (0.01 * 100 ** (i / 9), "x") for i in range(10)}, "layer")  # 0.01 to 1
    assert re.findall(r">([\d.]+)</text>", many)[-6:] == ["0.01", "0.025", "0.063", "0.16", "0.4", "1"]
    assert heat_map({}, "layer") == ""


NARROWED = "Shades: logarithmic, the widest gap between values narrowed"


@pytest.mark.parametrize(("usual", "far"), [((3.4, 4.3, 5.4, 6.6), 32.0), ((0.02, 0.021, 0.03, 0.05), 9.0), ((4.0, 5.0), 1e-4)])
def test_one_row_of_far_values_leaves_the_others_their_shades(usual, far):
    """Routers stay in 32 bits: on a logarithmic scale alone all other types would look alike."""
    cells = {("a", i): (value, "x") for i, value in enumerate(usual)} | {("router", 0): (far, "far")}
    drawing = heat_map(cells, "layer")
    depths = [float(depth) for depth in re.findall(r'fill-opacity="([\d.]+)"><title>x<', drawing)]
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] >= 0.4  # of 0.9, of which the far value leaves them more than half, or half to a pair
    assert float(re.search(r'fill-opacity="([\d.]+)"><title>far', drawing)[1]) == (1.0 if far > 1 else 0.1)
    assert NARROWED in drawing
    assert NARROWED not in heat_map({("a", i): (2.0**i, "x") for i in range(6)}, "layer")


def test_texts_are_shown_side_by_side_with_marks_where_they_differ(report):
    assert marked_texts("a <b> c d", "a <b> x d, e") == (
        "a &lt;b&gt; <mark>c</mark> d",
        "a &lt;b&gt; <mark>x</mark> d<mark>, e</mark>",
    )
    assert marked_texts("", "new") == ("", "<mark>new</mark>")
    assert marked_texts("same", "same") == ("same", "same")
    page = page_text(report | {"validation": VALIDATION})
    assert "<q>The list</q>: the first 2 of 3 words are the same" in page
    assert "sorted <mark>up</mark>" in page
    same = {"prompt": "a <b>", "baseline": "one", "result": "one"}
    page = page_text(report | {"validation": VALIDATION | {"texts": [*VALIDATION["texts"], same]}})
    assert "sorted <mark>up</mark>" in page
    assert "<q>a &lt;b&gt;</q>: the texts are the same" in page


def stock(label, bits, kld):
    return {"label": label, "file_bytes": 1 << 30, "bits_per_weight": bits, "validation": VALIDATION | {"kld_mean": kld}}


def test_stock_mixes_are_a_line_that_results_are_held_against(report):
    page = page_text(report | {"validation": VALIDATION})
    assert "Divergence and size" not in page  # of one point
    mixes = [stock("Q5_K_M", 5.7, 0.01), stock("IQ3_M", 3.7, 0.08), stock("Q4_K_M", 4.8, 0.03)]
    page = page_text(report | {"validation": VALIDATION, "stock": mixes})
    drawing = page[page.index("Divergence and size") :]
    drawing = drawing[: drawing.index("</svg>")]
    (line,) = re.findall(r'<polyline points="([^"]*)"', drawing)
    at = [tuple(map(float, point.split(","))) for point in line.split()]
    assert at == sorted(at)
    assert [y for _, y in at] == sorted(y for _, y in at)  # fewer bits diverge more, which is higher up
    assert re.findall(r">(Q\w+|IQ\w+|result)</text>", drawing) == ["IQ3_M", "Q4_K_M", "Q5_K_M", "result"]
    assert drawing.count("<circle") == 4
    assert "<td>stock IQ3_M</td>" in page


def test_names_of_points_do_not_touch():
    """Points that lie close together: no two boxes of names overlap, and none leaves the picture."""
    points = [(100.0 + 7 * i, 60.0 + 5 * (i % 3)) for i in range(9)]
    area = (46.0, 4.0, 340.0, 210.0)
    boxes = label_boxes(points, [(40.0, 10.0)] * 9, [points], area, radius=3)
    for i, a in enumerate(boxes):
        assert area[0] <= a[0] < a[2] <= area[2]
        assert area[1] <= a[1] < a[3] <= area[3]
        assert all(a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1] for b in boxes[:i])


def test_figures_have_their_errors(report):
    page = page_text(report | {"validation": VALIDATION})
    for tile in (
        "± 0.4000; perplexity, bf16: 12.0000",
        "± 0.50%; perplexity against",
        "± 0.00100; KL",
        "± 0.30; same top",
    ):
        assert tile in page
    assert page.count('band"/>') == 3
    without = {key: value for key, value in VALIDATION.items() if "error" not in key}
    without["running"] = {key: value for key, value in without["running"].items() if "error" not in key}
    old = page_text(report | {"validation": without})
    assert "±" not in old
    assert 'band"/>' not in old


def test_a_band_stays_within_the_picture():
    drawing = lines([Series("a", [1, 2, 3, 4], [5.0, 5.0, 5.0, 5.0], error=[90.0, 0.5, 0.4, None])], "x", "y")
    (band,) = re.findall(r'<polygon points="([^"]*)"', drawing)
    heights = [float(point.split(",")[1]) for point in band.split()]
    assert len(heights) == 6
    assert 18 <= min(heights) < max(heights) <= 160


@pytest.mark.parametrize("width", [420, 1100])
def test_nothing_of_the_shares_is_out_of_sight(report, tmp_path, width):
    webdriver = pytest.importorskip("selenium.webdriver")
    chrome, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chrome or not driver:
        pytest.skip("there is no chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    (tmp_path / "report.html").write_text(page_text(report))
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get((tmp_path / "report.html").as_uri())
        assert browser.execute_script("return innerWidth") == width
        over = "return [...document.querySelectorAll('.wide')].map(e => e.scrollWidth - e.clientWidth)"
        assert browser.execute_script(over)[:2] == [0, 0]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.quit()
