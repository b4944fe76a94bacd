import sys
import time

import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello"}]
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def render(text, **variables):
    return ChatTemplate(text).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**(10**10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x\\nx' | indent(10**10) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ range(10**10) | list }}",
        "{{ lipsum(10**6) }}",
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a.replace('x', 'xxxx') %}{% endfor %}",
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a.join([n.a, n.a]) %}{% endfor %}",
        "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = [n.a, n.a] | join(n.a) %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (messages | map(attribute='__class__') | first).mro() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_what_is_refused_at_once(text):
    began = time.perf_counter()
    with pytest.raises(PlanError) as told:
        render(text)
    assert time.perf_counter() - began < 4
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for a in messages * 60 recursive %}{{ loop(messages * 60) if loop.depth < 99 }}{% endfor %}",
    ],
)
def test_what_does_not_end(text, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.text.template_sandbox.SECONDS", 0.2)
    tracing = sys.gettrace()
    with pytest.raises(PlanError, match="runs for more than"):
        render(text)
    assert sys.gettrace() is tracing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ 'ab' ~ 3 ~ none }}", "ab3None"),
        (
            "{{ '-' * 5 + 'x' }} {{ 2 ** 10 * 3 % 7 }} {{ 2 + 2 }} {{ [1] + [2] }}",
            f"----- {2**10 * 3 % 7} 4 [1, 2]".replace("-----", "-----x"),
        ),
        ("{{ '%5s|%d' % ('a', 3) }} {{ '{:>4}'.format(7) }} {{ '%s' | format(1) }}", "    a|3    7 1"),
        ("{{ messages | map(attribute='content') | join(', ') }} {{ messages | join('-', attribute='role') }}", "Hello user"),
        ("{{ 'a b'.replace(' ', '__') }} {{ ', '.join(['a', 'b']) }} {{ 'x' | center(5) }}|", "a__b a, b   x  |"),
        ("{{ [1, 2] | tojson }} {{ 'a\\nb' | indent(2) }}", "[1, 2] a\n  b"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
    ],
)
def test_what_works_as_ever(text, said):
    assert render(text) == said


TENFOLD = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
TENFOLD += "{% endfor %}"
MEGA = "{% set a = 'a' * 1000000 %}"


@pytest.mark.parametrize(
    "text",
    [
        "{{ (1).to_bytes(4000000000, 'big') | length }}",
        MEGA + "{{ a | replace('', a) | length }}",
        MEGA + "{{ a.translate({97: a}) | length }}",
        MEGA + "{{ a.encode().replace(''.encode(), a.encode()) | length }}",
        MEGA + "{{ ('{0}' * 100000).format(a) | length }}",
        MEGA + "{{ ('%(a)s' * 100000 % {'a': a}) | length }}",
        "{{ ([1] * 1000000) | tojson(indent='x' * 1000000) | length }}",
        "{{ ('\\t' * 1000000).expandtabs(65536) | length }}",
    ],
)
def test_memory_is_what_the_process_may_have(text):
    with pytest.raises(PlanError, match="more than 1024 MiB of memory"):
        render(text)
    assert render("{{ messages[0].content }}") == "Hello"


@pytest.mark.parametrize("made_of_itself", ["{{ n.x == n.y }}", "{{ n.x | tojson | length }}"])
def test_what_only_the_end_of_the_process_stops(made_of_itself, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.text.template_sandbox.SECONDS", 0.2)
    with pytest.raises(PlanError, match="it takes too long, or too much memory"):
        render(TENFOLD + made_of_itself)
    assert render("{{ messages[0].content }}") == "Hello"


def test_the_process_opens_no_files():
    from ggufmill.runtime.text import template_process as confined

    for text in ("{{ 'a\\N{BULLET}' | pprint | urlize | striptags }}", "{{ 1 + 'a' }}", "{{ strftime_now('%A %c %Z') }}"):
        told = confined.answer(text, {})
        assert "written" in told or "unsupported operand" in told["said"]
    assert "No such file" not in confined.answer("{{ 'a'.encode('idna') }}", {})["said"]


def test_a_killed_process_is_replaced():
    from ggufmill.runtime.text import template_process as confined

    assert render("a") == "a"
    confined._process._running.kill()
    confined._process._running.wait()
    assert render("b") == "b"


def test_templates_of_several_threads_do_not_mix():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: render("{{ i * 2 }}", i=i), range(40))) == [str(2 * i) for i in range(40)]
