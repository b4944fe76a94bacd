import click
import pytest

from ggufmill.cli.options.fields import options_of
from ggufmill.cli.options.running import TokenBias
from ggufmill.runtime import Sampling


def options(*arguments):
    command = options_of(Sampling, json=False)(click.Command("x", callback=None))
    return command.make_context("x", list(arguments)).params


def test_defaults_are_those_of_sampling():
    assert Sampling(**options()) == Sampling()


def test_biases_of_tokens():
    assert options("-l", "5+1.5", "--logit-bias", "70-inf")["logit_bias"] == {5: 1.5, 70: -float("inf")}
    for wrong in ("5", "+1", "5+inf", "5*2", "x+1", "5+nan", "-5+1"):
        with pytest.raises(click.BadParameter, match=r"15043-inf"):
            TokenBias().convert(wrong, None, None)


def test_sequence_breakers():
    assert options("--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "x\\\\n")["dry_sequence_breakers"] == (
        "\n",
        "x\\n",
    )
    assert options("--dry-sequence-breaker", "none")["dry_sequence_breakers"] == ()
    with pytest.raises(click.BadParameter, match="none"):
        options("--dry-sequence-breaker", "none", "--dry-sequence-breaker", "a")
