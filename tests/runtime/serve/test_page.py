"""The built-in page in Chromium."""

import json
import re
import time

import pytest

pytest.importorskip("selenium")
from pages import ANSWER, answers, button, button_named, find, questions, say, screen, titles, turns, wait_for
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


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
    known = int(browser.find_elements(By.CSS_SELECTOR, ".turn.assistant .note")[1].text.split(" cached")[0].split()[-1])
    # The first question was sent again and found in the cache; its answer is read again, as a prompt's tokens are.
    assert known >= len("u:Hello <i>there</i>\na:")
    assert find(browser, "#status").get_attribute("textContent") == f"Answer: {ANSWER}"
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
    wait_for(browser, lambda: find(browser, "#temperature").get_attribute("placeholder") == "0")
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
    for name, value in {"top_p": "0.5", "top_k": "3", "min_p": "0.1", "dry": "0.8", "mirostat": "0", "seed": "7"}.items():
        find(browser, f"#{name}").send_keys(value, Keys.TAB)
    expected = {"max_tokens": 4, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "dry_multiplier": 0.8, "mirostat": 0, "seed": 7}
    expected |= {"logprobs": True, "top_logprobs": 5}
    assert browser.execute_script("return requestFields()") == expected
    find(browser, "#defaults").click()
    assert browser.execute_script("return requestFields()") == {"logprobs": True, "top_logprobs": 5}


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


MARKDOWN = """# Title

A **bold** and *slanted* `code <b>` word, 2 * 3 * 4, snake_case_name, \\*sign\\*
https://example.org/b. [link](https://example.org/a) [bad](javascript:alert(1))

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | <i>2</i> |

> quoted
> text

~~~python
print("<script>alert(1)</script>")
~~~

![picture](https://example.org/x.png)"""
MARKDOWN_PARTS = (
    "<h3>Title</h3>",
    "<strong>bold</strong> and <em>slanted</em> <code>code &lt;b&gt;</code> word, 2 * 3 * 4, snake_case_name, *sign*<br>"
    '<a href="https://example.org/b" target="_blank" rel="noopener noreferrer">https://example.org/b</a>. ',
    '<a href="https://example.org/a" target="_blank" rel="noopener noreferrer">link</a> [bad](javascript:alert(1))',
    "<ol><li>one</li><li>two<ul><li>inner</li></ul></li></ol>",
    '<td style="text-align: right;">&lt;i&gt;2&lt;/i&gt;</td>',
    "<blockquote><p>quoted<br>text</p></blockquote>",
    '<code>print("&lt;script&gt;alert(1)&lt;/script&gt;")</code>',
    '<a href="https://example.org/x.png" target="_blank" rel="noopener noreferrer">picture</a>',
)
RENDERED = "const n = make('div'); renderMarkdown(n, arguments[0]); return n.innerHTML"


def test_markdown(visit, url):
    browser = visit(url)
    html = browser.execute_script(RENDERED, MARKDOWN)
    assert [part for part in MARKDOWN_PARTS if part not in html] == []
    assert "<img" not in html
    assert "<script" not in html


def test_markdown_of_signs_alone(visit, url):
    browser = visit(url)
    for signs in ("*a", "[", "> ", "- ", "`", "|", "**a ", "_a ", "~~a ", "[a]("):
        assert browser.execute_script(RENDERED, signs * 2000)


GROWN = """
const n = make('div');
for (let i = 0; i <= arguments[0].length; i++) renderMarkdown(n, arguments[0].slice(0, i));
return n.innerHTML"""


def test_a_text_that_grows_looks_as_the_whole_text(visit, url):
    browser = visit(url)
    assert browser.execute_script(GROWN, MARKDOWN) == browser.execute_script(RENDERED, MARKDOWN)


def test_probabilities_of_tokens(visit, url):
    browser = visit(url)
    say(browser, "Hello")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    button(turns(browser)[0], "Tokens").click()
    tokens = browser.find_elements(By.CSS_SELECTOR, ".tokens span")
    assert "".join(token.get_attribute("textContent") for token in tokens) == ANSWER
    tokens[0].click()
    tip = find(browser, "#tip").text.splitlines()
    assert tip[:2] == ["H", "100 %"]
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    assert find(browser, "#tip").text.splitlines()[0] == "i"
    button(turns(browser)[0], "Tokens").click()
    assert answers(browser) == [ANSWER]


def test_conversations_are_kept_renamed_exported_imported_and_deleted(visit, url):
    browser = visit(url)
    say(browser, "One <i>")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    find(browser, "#reset").click()
    say(browser, "Two")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    assert titles(browser) == ["Two", "One <i>"]
    browser.get(url)
    assert titles(browser) == ["Two", "One <i>"]
    find(browser, "#conversations li:last-child .choose").click()
    assert [find(browser, ".turn.user .text").text, *answers(browser)] == ["One <i>", ANSWER]
    row = find(browser, "#conversations li.current")
    browser.execute_script("arguments[0].click()", button_named(row, "Rename One <i>"))
    find(browser, "#conversations input").send_keys(Keys.CONTROL, "a", Keys.NULL, "Uno", Keys.ENTER)
    assert titles(browser) == ["Uno", "Two"]
    exported = browser.execute_async_script(
        "const done = arguments[0]; URL.createObjectURL = (blob) => { blob.text().then(done); return '#' }; $('export').click()"
    )
    assert sorted(one["messages"][0]["content"] for one in json.loads(exported)["conversations"]) == ["One <i>", "Two"]
    browser.execute_script("window.confirm = () => true")
    browser.execute_script("arguments[0].click()", button_named(find(browser, "#conversations li.current"), "Delete Uno"))
    assert titles(browser) == ["Two"]
    assert turns(browser) == []
    browser.execute_script(
        "window.alert = (text) => { window.alerted = text }; importConversations('{\"conversations\": [{}]}')"
    )
    assert "not a conversation" in browser.execute_script("return alerted")
    browser.execute_script("importConversations(arguments[0])", exported)
    assert sorted(titles(browser)) == ["Two", "Two", "Uno"]


CALLS = """
const part = (delta) => ({ choices: [{ delta }] }), message = { role: 'assistant', content: '', tokens: [] };
addChunk(message, part({ reasoning_content: 'It asks for ' }));
addChunk(message, part({ reasoning_content: 'the weather.' }));
addChunk(message, part({ tool_calls: [{ index: 0, id: 'c1', function: { name: 'weather', arguments: '{"ci' } }] }));
addChunk(message, part({ tool_calls: [{ index: 0, function: { arguments: 'ty":"<b>"}' } }] }));
const one = { id: 'c', title: 'Calls', updated: 1, messages: [{ role: 'user', content: 'Weather?' }, message] };
openConversation(one);
window.sent = null;
answerNext = () => { sent = state.current.messages.slice(2); };
"""


def test_a_reload_goes_on_with_the_conversation(visit, url):
    """Of this tab; a new one begins an empty conversation and offers the latest. All that the browser keeps can be deleted."""
    browser = visit(url)
    assert not find(browser, "#clear").is_displayed()
    say(browser, "One")
    wait_for(browser, lambda: answers(browser) == [ANSWER])
    browser.refresh()
    assert (questions(browser), answers(browser)) == (["One"], [ANSWER])
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    assert find(browser, ".turn.assistant .who").text == find(browser, "#name").text
    say(browser, "Two")
    wait_for(browser, lambda: answers(browser) == [ANSWER] * 2)
    find(browser, "#reset").click()
    browser.refresh()
    assert questions(browser) == []  # an empty one was begun
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    assert questions(browser) == []
    button(find(browser, "#log"), "Continue: One").click()
    assert (questions(browser), answers(browser)) == (["One", "Two"], [ANSWER] * 2)
    browser.execute_script("window.confirm = (text) => { window.asked = text; return true }")
    find(browser, "#clear").click()
    assert browser.execute_script("return asked") == "Delete the conversation that this browser keeps?"
    assert (questions(browser), titles(browser)) == ([], [])
    assert browser.execute_script("return Object.keys(localStorage).filter((key) => key.startsWith('ggufmill-chat-'))") == []
    browser.refresh()
    assert (questions(browser), titles(browser)) == ([], [])


def test_an_answer_that_a_reload_cut_off_is_kept(visit, served, reciting):
    browser = visit(served(reciting("abcdefg", end=False, n_ctx=200_000)))
    say(browser, "One")
    wait_for(browser, lambda: "abcdefgabcdefg" in find(browser, ".turn.assistant .text").text)
    browser.refresh()
    assert (questions(browser), len(answers(browser))) == (["One"], 1)
    assert answers(browser)[0].startswith("abcdefgabcdefg")
    assert find(browser, ".turn.assistant .note").text == "Stopped: the page was left."


def test_calls_of_functions_and_their_results(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    browser.execute_script(CALLS)
    assert find(browser, ".thoughts summary").text == "Thoughts"
    assert not find(browser, ".thoughts div").is_displayed()  # folded
    assert find(browser, ".calls .call").text == "Calls weather"
    assert find(browser, ".calls pre").text == '{\n  "city": "<b>"\n}'
    find(browser, ".calls textarea").send_keys("rain")
    button_named(find(browser, ".calls"), "Send what the functions return").click()
    assert browser.execute_script("return sent") == [{"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    find(browser, "#tools-field summary").click()
    find(browser, "#tools").send_keys("{", Keys.TAB)
    assert find(browser, "#tools-error").text.startswith("Not used: ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 900)])
def test_nothing_sticks_out_or_is_covered(visit, url, width, height, scheme):
    browser = visit(url)
    with screen(browser, width, height, scheme):
        browser.refresh()
        say(browser, "Hello " + "x" * 300)
        wait_for(browser, lambda: answers(browser) == [ANSWER])
        for panel in ("open", "open-list"):
            if find(browser, f"#{panel}").get_attribute("aria-expanded") == "false":
                find(browser, f"#{panel}").click()
            assert browser.execute_script("return document.documentElement.scrollWidth") == width
            boxes = {
                id: find(browser, id).rect for id in ("#log", "#side", "#list", "#write") if find(browser, id).is_displayed()
            }
            assert boxes["#log"]["height"] > height / 4
            assert [(a, b) for a in boxes for b in boxes if a < b and overlap(boxes[a], boxes[b])] == []
        assert find(browser, ".turn.assistant .text").is_displayed()
        back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 300) == (scheme == "dark")


def overlap(a, b):
    """Whether two rectangles have more than a rounded pixel in common."""
    return all(min(a[p] + a[n], b[p] + b[n]) - max(a[p], b[p]) > 1 for p, n in (("x", "width"), ("y", "height")))


def test_everything_by_keyboard(visit, served, reciting):
    browser = visit(served(reciting("abcdefg", end=False, n_ctx=200_000)))
    assert browser.switch_to.active_element.get_attribute("id") == "message"
    browser.switch_to.active_element.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert find(browser, "#message").get_attribute("value") == "one\ntwo"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait_for(browser, lambda: "abcdefgabcdefg" in find(browser, ".turn.assistant .text").text)
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_for(browser, lambda: len(answers(browser)) == 1)
    assert find(browser, ".turn.assistant .note").text.startswith("Stopped.")
    reached, seen = [], set()
    for _ in range(60):
        active = browser.switch_to.active_element
        if active.id in seen:
            break
        seen.add(active.id)
        reached.append(active.get_attribute("aria-label") or active.text or active.get_attribute("id"))
        active.send_keys(Keys.TAB)
    assert {"Chats", "Settings", "New conversation", "Copy answer", "Regenerate", "temperature", "seed", "Message"} <= set(
        reached
    )


def test_a_narrow_screen(visit, url):
    browser = visit(url)
    with screen(browser, 360, 640):
        browser.refresh()
        assert not find(browser, "aside").is_displayed()
        find(browser, "#open").click()
        assert find(browser, "#temperature").is_displayed()
        browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert not find(browser, "aside").is_displayed()
        assert browser.switch_to.active_element.get_attribute("id") == "open"
        say(browser, "Hello")
        wait_for(browser, lambda: answers(browser) == [ANSWER])


def test_code_and_reasoning_are_shown_as_text(visit, url):
    browser = visit(url)
    wait_for(browser, lambda: "llama" in find(browser, "#summary").text)
    text = "<think>hm <b>x</b></think>\n\nSee:\n```html\n<script>alert(1)</script>\n```\nDone & <img src=x onerror=alert(2)>"
    browser.execute_script("$('log').replaceChildren(turnOf({ role: 'assistant', content: arguments[0] }))", text)
    turn = find(browser, ".turn.assistant .text")
    assert find(browser, ".turn pre").text == "<script>alert(1)</script>"
    assert find(browser, ".turn details summary").text == "Thoughts"
    assert "Done & <img src=x onerror=alert(2)>" in turn.text
    assert browser.find_elements(By.CSS_SELECTOR, ".turn script, .turn img, .turn b") == []
