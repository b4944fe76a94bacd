"""The built-in page in Chromium."""

import shutil
import time

import pytest

pytest.importorskip("selenium")
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

ANSWER = "Hi <b>you!"  # no byte twice; markup in it must stay text


@pytest.fixture(scope="module")
def browser():
    chrome = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not chrome or not driver:
        pytest.skip("there is no chromium with its driver")
    options = ChromeOptions()
    options.binary_location = chrome
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,800"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options, ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def visit(browser):
    """visit(url): opens the page with empty storage; checks at the end that the console has no errors."""

    def go(url):
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get_log("browser")
        browser.get(url)
        return browser

    yield go
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "401" not in entry["message"]]
    assert severe == []


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def wait_for(browser, condition):
    return WebDriverWait(browser, 15, 0.05).until(lambda _: condition())


def say(browser, text):
    wait_for(browser, lambda: find(browser, "#send").is_displayed())
    find(browser, "#message").send_keys(text, Keys.ENTER)


def answers(browser):
    return [turn.text for turn in browser.find_elements(By.CSS_SELECTOR, ".turn.assistant:not(.busy) .text")]


@pytest.fixture(scope="module")
def url(served, reciting):
    return served(reciting(ANSWER))


def test_a_conversation(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    say(browser, "Hello <i>there</i>")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    assert find(browser, ".turn.user .text").text == "Hello <i>there</i>"
    assert browser.find_elements(By.CSS_SELECTOR, ".turn b, .turn i") == []
    note = find(browser, ".turn.assistant .note").text
    assert note.startswith(f"{len(ANSWER)} tokens, ")
    say(browser, "And again")
    wait_for(browser, lambda: answers(browser) == [ANSWER] * 2)
    known = int(browser.find_elements(By.CSS_SELECTOR, ".turn.assistant .note")[1].text.split(" known")[0].split()[-1])
    assert known > len("u:Hello <i>there</i>\na:" + ANSWER)  # the first turn was sent again and found in the cache
    find(browser, "#reset").click()
    assert browser.find_elements(By.CSS_SELECTOR, ".turn") == []


def test_the_description_of_the_file(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: find(browser, "#model").is_displayed())
    facts = find(browser, "#facts").text
    for part in ("Reciter <b>", "llama", "Bits per weight", "32.000", "512 tokens", "4,096 tokens"):
        assert part in facts
    assert "f32" in find(browser, "#types").text
    assert find(browser, "#recipe").text == "attn=q8_0\nffn=q4_K"
    assert browser.title == "Reciter <b> (ggufmill)"


def test_settings_are_sent_and_saved(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: find(browser, "#temperature").get_attribute("value") == "0")
    find(browser, "#limit").send_keys("4", Keys.TAB)
    find(browser, "#system").send_keys("Be kind.", Keys.TAB)
    say(browser, "Hello")
    wait_for(browser, lambda: answers(browser) == [ANSWER[:4]])
    assert "cut off at the limit" in find(browser, ".turn .note").text
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(r => r.name)")
    assert all(name.startswith(url) or name.startswith("data:") for name in loaded)  # nothing comes from elsewhere
    browser.refresh()
    assert find(browser, "#limit").get_attribute("value") == "4"
    assert find(browser, "#system").get_attribute("value") == "Be kind."


def test_stop(visit, served, reciting):
    browser = visit(served(reciting("abcdefg", end=False, n_ctx=200_000)))
    say(browser, "Go")
    turn = wait_for(browser, lambda: find(browser, ".turn.assistant.busy .text"))
    wait_for(browser, lambda: turn.text.startswith("abcdefgabcdefg"))
    find(browser, "#stop").click()
    wait_for(browser, lambda: len(answers(browser)) == 1)
    length = len(answers(browser)[0])
    time.sleep(0.2)
    assert len(answers(browser)[0]) == length
    assert find(browser, ".turn.assistant .note").text == "Stopped."
    find(browser, "#limit").send_keys("3", Keys.TAB)
    say(browser, "Again")
    wait_for(browser, lambda: len(answers(browser)) == 2)
    assert answers(browser)[1] == "abc"


def test_a_message_sent_before_the_description_has_arrived(visit, served, reciting):
    browser = visit(served(reciting(ANSWER)))
    say(browser, "Go")
    wait_for(browser, lambda: len(answers(browser)) == 1)
    failure = browser.execute_async_script("const done = arguments[0]; describe().then(() => done(''), e => done(String(e)))")
    assert failure == ""


def test_the_page_asks_for_the_api_key(visit, served, reciting):
    browser = visit(served(reciting(ANSWER), api_key="k3y"))
    field = wait_for(browser, lambda: find(browser, "#key") if find(browser, "#key").is_displayed() else None)
    assert find(browser, "#name").text == "ggufmill"  # nothing is shown before
    field.send_keys("k3y", Keys.TAB)
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    say(browser, "Hello")
    wait_for(browser, lambda: answers(browser) == [ANSWER])


def test_a_narrow_screen(visit, url):
    browser = visit(url)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360  # nothing sticks out
        assert not find(browser, "aside").is_displayed()
        find(browser, "#open").click()
        assert find(browser, "#temperature").is_displayed()
        find(browser, "#open").click()
        say(browser, "Hello")
        wait_for(browser, lambda: answers(browser) == [ANSWER])
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_code_and_reasoning_are_shown_as_text(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    text = "<think>hm <b>x</b></think>\n\nSee:\n```html\n<script>alert(1)</script>\n```\nDone & <img src=x onerror=alert(2)>"
    browser.execute_script("show('assistant', arguments[0])", text)
    turn = find(browser, ".turn.assistant .text")
    assert find(browser, ".turn pre").text == "<script>alert(1)</script>"
    assert find(browser, ".turn details summary").text == "Thoughts"
    assert "Done & <img src=x onerror=alert(2)>" in turn.text
    assert browser.find_elements(By.CSS_SELECTOR, ".turn script, .turn img, .turn b") == []
