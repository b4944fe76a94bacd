"""The built-in page in Chromium: answers and questions that have several versions."""

import pytest

pytest.importorskip("selenium")
from pages import ANSWER, answers, button, button_named, find, questions, say, turns, wait_for
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

BROKEN_VERSIONS = """
const question = { role: 'user', content: 'a', ...arguments[0] }, answer = { role: 'assistant', content: 'b' };
return checkedConversation({ id: 'd', title: 'T', messages: [question, answer] }).messages"""


@pytest.fixture(scope="module")
def url(served, reciting):
    return served(reciting(ANSWER))


def test_regenerate_edit_and_copy(visit, url):
    browser = visit(url)
    say(browser, "First")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    say(browser, "Second")
    wait_for(browser, lambda: len(answers(browser)) == 2)
    button(turns(browser)[0], "Regenerate").click()
    wait_for(browser, lambda: len(turns(browser, "user")) == 1 and answers(browser) == [ANSWER])
    button(turns(browser, "user")[0], "Edit").click()
    field = find(browser, ".edit textarea")
    assert field.get_attribute("value") == "First"
    field.send_keys(Keys.ESCAPE)
    assert find(browser, ".turn.user .text").text == "First"
    button(turns(browser, "user")[0], "Edit").click()
    find(browser, ".edit textarea").send_keys(" again", Keys.ENTER)
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    assert [turn.find_element(By.CSS_SELECTOR, ".text").text for turn in turns(browser, "user")] == ["First again"]
    browser.execute_script("window.copied = []; copyText = (text, button) => copied.push(text)")
    button(turns(browser)[0], "Copy").click()
    assert browser.execute_script("return copied") == [ANSWER]


def versions(browser):
    return [one.text.split() for one in browser.find_elements(By.CSS_SELECTOR, ".versions")]


def test_versions_of_an_answer(visit, url):
    """Regenerating keeps what was there, with all that followed it; by keyboard, for screen readers, and over a reload."""
    browser = visit(url)
    say(browser, "First")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    say(browser, "Second")
    wait_for(browser, lambda: answers(browser) == [ANSWER] * 2)
    assert versions(browser) == []
    for number, limit in ((2, 4), (3, 2)):
        browser.execute_script("$('limit').value = arguments[0]; $('limit').dispatchEvent(new Event('change'))", limit)
        button(turns(browser)[0], "Regenerate").click()
        expected = [ANSWER[:limit]], [["◀", f"{number}/{number}", "▶"]]
        wait_for(browser, lambda wanted=expected: (answers(browser), versions(browser)) == wanted)
    assert not button_named(turns(browser)[0], "Next version").is_enabled()

    button_named(turns(browser)[0], "Previous version").send_keys(Keys.ENTER)
    assert (answers(browser), versions(browser)) == ([ANSWER[:4]], [["◀", "2/3", "▶"]])
    assert browser.switch_to.active_element.get_attribute("aria-label") == "Previous version"
    assert find(browser, "#status").get_attribute("textContent") == f"Version 2 of 3: {ANSWER[:4]}"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert answers(browser) == [ANSWER] * 2  # with the question and the answer that came after it
    assert [turn.find_element(By.CSS_SELECTOR, ".text").text for turn in turns(browser, "user")] == ["First", "Second"]
    assert browser.switch_to.active_element.get_attribute("aria-label") == "Next version"  # there is none before
    group = find(browser, ".versions")
    assert (group.get_attribute("role"), group.get_attribute("aria-label")) == ("group", "Versions of this answer")
    assert group.find_element(By.CSS_SELECTOR, "[role=img]").get_attribute("aria-label") == "Version 1 of 3"

    exported = browser.execute_script("return JSON.stringify({ conversations: [...conversations.values()] })")
    browser.get(url)
    assert (answers(browser), versions(browser)) == ([ANSWER] * 2, [["◀", "1/3", "▶"]])
    browser.execute_script("importConversations(arguments[0])", exported)
    browser.find_elements(By.CSS_SELECTOR, "#conversations li:not(.current) .choose")[0].click()
    button_named(turns(browser)[0], "Next version").click()
    assert (answers(browser), versions(browser)) == ([ANSWER[:4]], [["◀", "2/3", "▶"]])


def test_a_version_that_came_to_nothing_is_dropped(visit, url):
    browser = visit(url)
    say(browser, "First")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    browser.execute_script("window.known = fetch; window.fetch = async () => { throw new Error('no connection') }")
    button(turns(browser)[0], "Regenerate").click()
    wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".note.bad"))
    assert find(browser, ".note.bad").text == "no connection"
    assert (answers(browser), versions(browser)) == ([ANSWER], [])
    browser.execute_script("window.fetch = known")
    button(turns(browser)[0], "Regenerate").click()
    wait_for(browser, lambda: versions(browser) == [["◀", "2/2", "▶"]])
    assert answers(browser) == [ANSWER]


def change(browser, number, more):
    """Edits a question and sends it again."""
    button(turns(browser, "user")[number], "Edit").click()
    find(browser, ".edit textarea").send_keys(more, Keys.ENTER)


def test_versions_of_a_question(visit, url):
    """A changed question keeps the one before, with all that followed it; of the first question too, and over a reload."""
    browser = visit(url)
    for text in ("First", "Second"):
        say(browser, text)
        wait_for(
            browser, lambda wanted=text: questions(browser)[-1] == wanted and len(answers(browser)) == len(questions(browser))
        )
    change(browser, 1, " again")
    wait_for(browser, lambda: (questions(browser), len(answers(browser))) == (["First", "Second again"], 2))
    assert versions(browser) == [["◀", "2/2", "▶"]]
    assert find(browser, ".versions").get_attribute("aria-label") == "Versions of this question"
    change(browser, 0, " of all")
    wait_for(browser, lambda: (questions(browser), answers(browser)) == (["First of all"], [ANSWER]))
    wait_for(browser, lambda: versions(browser) == [["◀", "2/2", "▶"]])
    browser.get(url)
    assert (questions(browser), versions(browser)) == (["First of all"], [["◀", "2/2", "▶"]])
    button_named(turns(browser, "user")[0], "Previous version").click()
    assert (questions(browser), answers(browser)) == (["First", "Second again"], [ANSWER] * 2)
    assert versions(browser) == [["◀", "1/2", "▶"], ["◀", "2/2", "▶"]]
    button_named(turns(browser, "user")[1], "Previous version").click()
    assert questions(browser) == ["First", "Second"]
    assert find(browser, "#status").get_attribute("textContent") == "Version 1 of 2: Second"


def test_a_changed_question_that_was_not_answered_is_no_version(visit, url):
    browser = visit(url)
    browser.execute_script("window.known = fetch; window.fetch = async () => { throw new Error('no connection') }")
    say(browser, "First")
    wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".note.bad"))
    browser.execute_script("window.fetch = known")
    change(browser, 0, " again")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    assert (questions(browser), versions(browser)) == (["First again"], [])


def test_versions_of_a_damaged_file_are_left_out(visit, url):
    browser = visit(url)
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [{"role": "assistant", "content": "c"}]
    for broken in (
        {"answers": "x", "shown": 0},
        {"answers": [None], "shown": 0},
        {"answers": [None, None], "shown": 0},
        {"answers": [None, []], "shown": 0},
        {"answers": [other, other], "shown": 0},
        {"answers": [None, other], "shown": "0"},
        {"answers": [None, other], "shown": 2},
    ):
        assert browser.execute_script(BROKEN_VERSIONS, broken) == plain
    whole = {"answers": [other, None], "shown": 1}
    assert browser.execute_script(BROKEN_VERSIONS, whole) == [plain[0] | whole, plain[1]]
