import json
import subprocess
import sys

import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime.text import template_sandbox
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
def test_operations_beyond_the_limits_are_refused_before_they_run(text):
    with pytest.raises(PlanError) as caught:
        render(text)
    assert "it runs for more than" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for a in messages * 60 recursive %}{{ loop(messages * 60) if loop.depth < 99 }}{% endfor %}",
    ],
)
def test_endless_templates_are_stopped(text, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.text.template_sandbox.SECONDS", 0.2)
    trace = sys.gettrace()
    with pytest.raises(PlanError, match="runs for more than"):
        render(text)
    assert sys.gettrace() is trace


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_expressions_within_the_limits(text, expected):
    assert render(text) == expected


SHARED_LISTS = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
)
SHARED_LISTS += "{% endfor %}"
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
def test_the_memory_of_the_process_is_limited(text):
    with pytest.raises(PlanError, match="more than 1024 MiB of memory"):
        render(text)
    assert render("{{ messages[0].content }}") == "Hello"


@pytest.mark.process
@pytest.mark.parametrize("expression", ["{{ n.x == n.y }}", "{{ n.x | tojson | length }}"])
def test_native_code_is_stopped_by_killing_the_process(expression, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.text.template_sandbox.SECONDS", 0.2)
    with pytest.raises(PlanError, match="it takes too long, or too much memory"):
        render(SHARED_LISTS + expression)
    assert render("{{ messages[0].content }}") == "Hello"


def test_the_process_opens_no_files():
    from ggufmill.runtime.text.template_process import run_template

    for text in ("{{ 'a\\N{BULLET}' | pprint | urlize | striptags }}", "{{ 1 + 'a' }}", "{{ strftime_now('%A %c %Z') }}"):
        result = run_template(text, {})
        assert "text" in result or "unsupported operand" in result["message"]
    assert "No such file" not in run_template("{{ 'a'.encode('idna') }}", {})["message"]


def test_a_killed_process_is_replaced():
    from ggufmill.runtime.text import template_process

    assert render("a") == "a"
    template_process._process._process.kill()
    template_process._process._process.wait()
    assert render("b") == "b"


def test_several_threads_get_the_results_of_their_own_templates():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: render("{{ i * 2 }}", i=i), range(40))) == [str(2 * i) for i in range(40)]


def test_without_the_resource_module_the_checks_remain():
    """As on Windows, where processes have no such limits."""
    program = """
import runpy, sys
sys.modules["resource"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    requests = [{"text": text, "variables": {}, "seconds": 5} for text in ("{{ 1 + 1 }}", "{{ 'x' * 10**10 }}")]
    command = [sys.executable, "-c", program, template_sandbox.__file__]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    run = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    first, second = (json.loads(line) for line in run.stdout.split("\n") if line)
    assert first == {"text": "2"}, run.stderr
    assert second["error"] == "refused"
