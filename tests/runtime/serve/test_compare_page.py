"""The page that compares two models, in Chromium."""

import numpy as np
import pytest

pytest.importorskip("selenium")
from pages import find, screen, wait_for
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from ggufmill.runtime.serve import serve_models

TEXTS = {"a": "Hi <b>you!", "b": "Hi <x>GOD", "c": "Hi <b>you!"}  # no byte twice
PARTS = 4  # of a and b: at this token


@pytest.fixture(scope="module")
def models(reciting):
    return {name: reciting(text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def url(running, models, write_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in TEXTS:
        write_model(folder / f"{name}.gguf")
    (folder / "broken.gguf").write_bytes(b"no model")
    return running(
        serve_models, folder, lambda path: (models[path.stem], {"temp": 0}), needed=lambda path: 100, memory=1000, warm_up=False
    )


def compare(browser, text="Hello"):
    wait_for(browser, lambda: find(browser, "#send").is_enabled())
    find(browser, "#text").clear()
    find(browser, "#text").send_keys(text, Keys.ENTER)
    wait_for(
        browser, lambda: find(browser, "#verdict").text.startswith(("The ", "Both answers")) or find(browser, "#error").text
    )


def spans(browser, side):
    return browser.find_elements(By.CSS_SELECTOR, f"#answer-{side} .tokens span")


def divergences(a, b):
    """KL divergence in nats of rows of logits b from a."""
    logs = [x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True) for x in (a, b)]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)


def test_answers_stand_side_by_side_and_tokens_have_the_divergence(visit, url, models):
    browser = visit(f"{url}/compare")
    compare(browser)
    assert find(browser, "#error").text == ""
    for side in ("a", "b"):
        assert "".join(one.get_attribute("textContent") for one in spans(browser, side)) == TEXTS[side]
        first = find(browser, f"#answer-{side} .parts")
        assert first.get_attribute("textContent") == TEXTS[side][PARTS]
        assert "kl-4" in first.get_attribute("class")
        assert [one.get_attribute("class") for one in spans(browser, side)[:PARTS]] == ["kl-0"] * PARTS
    assert find(browser, "#verdict").text.startswith("The first 4 tokens are the same. Mean KL divergence of B from A: ")
    assert browser.find_elements(By.CSS_SELECTOR, "#answers b, #answers x") == []

    prompt = models["a"].tokenizer.encode("u:Hello\na:")  # of the template, which begins with bos
    answer = [2 + byte for byte in TEXTS["a"].encode()]
    rows = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    exact = divergences(*(models[name].logits([*prompt, *answer])[rows] for name in "ab"))
    shown = np.array(
        browser.execute_script("return [...document.querySelectorAll('#answer-a .tokens span')].map((s) => s.token.kl)")
    )
    assert (shown <= exact + 1e-3).all()
    assert shown[PARTS] > 0.5 * exact[PARTS] > 1

    spans(browser, "a")[0].click()
    spans(browser, "a")[0].send_keys(*[Keys.ARROW_RIGHT] * PARTS)
    tip = find(browser, "#tip").text.splitlines()
    assert tip[0] == f"KL divergence {shown[PARTS]:.3f}"
    assert tip[1:3] == ["A", "B"]


def test_equal_answers_and_what_the_address_chooses(visit, url):
    browser = visit(f"{url}/compare?a=c&b=a")
    compare(browser)
    assert [find(browser, f"#name-{side}").text for side in ("a", "b")] == ["c", "a"]
    assert find(browser, "#verdict").text.startswith("Both answers are the same 10 tokens.")
    assert {one.get_attribute("class") for side in ("a", "b") for one in spans(browser, side)} == {"kl-0"}
    assert browser.find_elements(By.CSS_SELECTOR, "#answers .parts") == []


def listed(browser, selector):
    """Names of a list, and whether they can be chosen."""
    options = browser.find_elements(By.CSS_SELECTOR, f"{selector} option")
    return {one.get_attribute("textContent"): one.is_enabled() for one in options}


def test_the_lists_of_models(visit, url):
    """Of the page that compares: those that can be loaded, of which any two can be chosen. Of the chat: all."""
    browser = visit(f"{url}/compare")
    wait_for(browser, lambda: find(browser, "#send").is_enabled())
    assert [listed(browser, f"#{side}") for side in ("a", "b")] == [dict.fromkeys(TEXTS, True)] * 2
    assert [find(browser, f"#{side}").get_attribute("value") for side in ("a", "b")] == ["a", "b"]
    Select(find(browser, "#a")).select_by_visible_text("b")
    Select(find(browser, "#b")).select_by_visible_text("c")
    compare(browser)
    assert [find(browser, f"#name-{side}").text for side in ("a", "b")] == ["b", "c"]
    assert ["".join(one.get_attribute("textContent") for one in spans(browser, side)) for side in ("a", "b")] == [
        TEXTS["b"],
        TEXTS["c"],
    ]
    browser = visit(url)
    wait_for(browser, lambda: find(browser, "#models").is_displayed())
    assert listed(browser, "#models") == {"broken": False} | dict.fromkeys(TEXTS, True)
    Select(find(browser, "#models")).select_by_visible_text("c")
    wait_for(browser, lambda: find(browser, "#name").text == "c")


def test_the_bound_stays_below_the_divergence_and_near_it(visit, url):
    """Of random distributions over 300 tokens, of which each side tells 20 and the token that stands there."""
    browser, random = visit(f"{url}/compare"), np.random.default_rng(1)
    for scale, noise, least in ((3.0, 0.1, 0.5), (3.0, 1.0, 0.6), (6.0, 0.3, 0.9), (0.1, 0.1, 0.0), (20.0, 20.0, 0.7)):
        a = scale * random.standard_normal(300)
        b = a + noise * random.standard_normal(300)
        logs = [x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in (a, b)]
        told = [{f"t{i}": float(x[i]) for i in {*np.argsort(x)[-20:].tolist(), 7}} for x in logs]
        bound, exact = browser.execute_script("return divergence(arguments[0], arguments[1])", *told), float(divergences(a, b))
        assert -1e-9 <= bound <= exact + 1e-6
        assert bound >= least * exact, (scale, noise)
    assert browser.execute_script("return divergence({a: 0}, {b: 0})") > 10


def test_a_server_of_one_model_says_what_is_missing(visit, served, reciting):
    browser = visit(f"{served(reciting(TEXTS['a']))}/compare")
    wait_for(browser, lambda: find(browser, "#error").is_displayed())
    assert "`ggufmill serve --models FOLDER`" in find(browser, "#error").text
    assert not find(browser, "#send").is_enabled()


def test_the_chat_page_leads_there(visit, url, served, reciting):
    browser = visit(url)
    wait_for(browser, lambda: find(browser, "#compare").is_displayed())
    find(browser, "#compare").click()
    wait_for(browser, lambda: browser.title.startswith("Compare two models"))
    assert not find(visit(served(reciting(TEXTS["a"]))), "#compare").is_displayed()


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1200, 2)])
def test_nothing_sticks_out(visit, url, width, columns):
    browser = visit(f"{url}/compare")
    with screen(browser, width, 844, "dark"):
        browser.refresh()
        compare(browser, "x" * 300)
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        tops = {find(browser, f"#name-{side}").rect["y"] for side in ("a", "b")}
        assert len(tops) == 3 - columns
