"""What tests do on the pages of the server, in a browser."""

from contextlib import contextmanager

import pytest

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

ANSWER = "Hi <b>you!"  # no byte twice; markup in it must stay text


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def wait_for(browser, condition):
    return WebDriverWait(browser, 90, 0.05).until(lambda _: condition())


def say(browser, text):
    wait_for(browser, lambda: find(browser, "#send").is_displayed())
    find(browser, "#message").send_keys(text, Keys.ENTER)


def turns(browser, role="assistant"):
    return browser.find_elements(By.CSS_SELECTOR, f".turn.{role}:not(.busy)")


def answers(browser):
    return [turn.find_element(By.CSS_SELECTOR, ".text").text for turn in turns(browser)]


def button(parent, label):
    return next(one for one in parent.find_elements(By.TAG_NAME, "button") if one.text == label)


def titles(browser):
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#conversations .choose")]


@contextmanager
def screen(browser, width, height, scheme="light"):
    """A phone or a window of this size, light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def button_named(parent, name):
    return next(one for one in parent.find_elements(By.TAG_NAME, "button") if one.get_attribute("aria-label") == name)


def questions(browser):
    return [turn.find_element(By.CSS_SELECTOR, ".text").text for turn in turns(browser, "user")]
