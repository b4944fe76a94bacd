import sys
import time

import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime.chat import ChatTemplate

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
    monkeypatch.setattr("ggufmill.runtime.sandbox.SECONDS", 0.2)
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
