"""The options that all verbs share which run a model."""

import dataclasses
import json
import os

import click
import pytest
from click.testing import CliRunner

from ggufmill.cli.options.fields import options_of
from ggufmill.operating_system.processors import allowed_cpus
from ggufmill.pipeline.requests.generate import ServeRequest
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Settings


@pytest.fixture
def run():
    """run(*arguments) -> the settings that a verb gets, or what click says is wrong."""

    def invoke(*arguments):
        @click.command()
        @options_of(ServeRequest, json=False)
        def verb(model, **options):
            click.echo(json.dumps({name: options[name] for name in options.keys() & Settings.__dataclass_fields__.keys()}))

        result = CliRunner().invoke(verb, [*arguments, str(FOLDER / "demo")])
        return result.output if result.exit_code else json.loads(result.stdout)

    return invoke


def test_options_not_given_are_left_to_the_library(run):
    assert run() == {}


def test_every_option_becomes_a_setting(run):
    short = (
        "-c 99 -t 3 -C 0x5 -Cr 2-3 --numa isolate "
        "-b 64 -ub 32 -np 4 -ctk q8_KV -ctv IQ4_NL -fa off -mla 1 -amb 256 -rtr -ser 6,0.4 --ctx-checkpoints 3 "
        "--lora a.gguf --lora b=0.5 -ctk-first Q8_0,2 -ctk-last f16,1 -ctv-first bf16,3 -ctv-last q5_0,4 -khad -no-vhad"
    )
    long = (
        "--ctx-size 99 --threads 3 --cpu-mask 5 --cpu-range 2-3 --numa ISOLATE "
        "--batch-size 64 --ubatch-size 32 --parallel 4 --cache-type-k q8_kv --cache-type-v iq4_nl "
        "--flash-attn 0 --mla-use 1 --attn-max-batch 256 --run-time-repack --smart-expert-reduction 6,0.4 "
        "--ctx-checkpoints 3 --lora a.gguf --lora b=0.5 --cache-type-k-first q8_0,2 --cache-type-k-last f16,1 "
        "--cache-type-v-first bf16,3 --cache-type-v-last q5_0,4 --k-cache-hadamard --no-v-cache-hadamard"
    )
    expected = {
        "n_ctx": 99,
        "threads": 3,
        "cpus": [0, 2, 3],
        "numa": "isolate",
        "batch": 64,
        "ubatch": 32,
        "parallel": 4,
        "cache_k": "q8_KV",
        "cache_v": "iq4_nl",
        "flash": False,
        "mla": 1,
        "attention_bytes": 256 << 20,
        "repack": True,
        "expert_reduction": [6, 0.4],
        "checkpoints": 3,
        "lora": ["a.gguf", "b=0.5"],
        "cache_k_first": ["q8_0", 2],
        "cache_k_last": ["f16", 1],
        "cache_v_first": ["bf16", 3],
        "cache_v_last": ["q5_0", 4],
        "k_cache_hadamard": True,
        "v_cache_hadamard": False,
    }
    assert run(*short.split()) == run(*long.split()) == expected
    assert expected.keys() <= {field.name for field in dataclasses.fields(Settings)}
    assert run("-fa", "-mla", "2")["flash"] is True  # as a flag, the way ik_llama.cpp has it


def test_wrong_values_are_explained(run):
    assert "'q9' is not one of 'f32'" in run("-ctk", "q9")
    assert "is not N,T" in run("-ser", "6")
    for text in ("q8_0", "q9,2", "q8_0,0", "q8_0,x"):
        assert "is not TYPE,N: a type of f32, f16" in run("-ctk-first", text)
    for mask in ("0", "xyz", "-1", ""):
        assert "is no hexadecimal number above 0" in run("-C", mask)
    for cpus in ("3", "3-2", "a-b", "-1-2"):
        assert "is no range of processors" in run("-Cr", cpus)
    assert "4 is not in the range 0<=x<=3" in run("-mla", "4")
    for tokens in ("3", "2147483648", "99999999999999999999"):
        assert f"{tokens} is not in the range 4<=x<=2147483647" in run("-c", tokens)


@pytest.mark.parametrize(("n_ctx", "warnings"), [((), 0), (("-c", 2048), 0), (("-c", 2049), 1)])
def test_generating_beyond_the_trained_context_is_warned_of(mill, n_ctx, warnings):
    code, out, err = mill("generate", FOLDER / "demo", "-p", "The list", "-n", 2, "--temp", 0, "--json", *n_ctx)
    assert code == 0
    assert json.loads(out)["prompt"] == "The list"
    assert err.count("warning: n_ctx is 2049, but the model was trained with a context of 2048 tokens\n") == warnings


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_threads_on_chosen_processors(mill):
    words = ("generate", FOLDER / "demo", "-p", "The list", "-n", 2, "--temp", 0)
    allowed = allowed_cpus()
    free = mill(*words, "-t", 1)
    assert free[0] == 0
    for options in (("--cpu-mask", f"{1 << allowed[-1]:x}"), ("--numa", "isolate", "-t", 1), ("--numa", "distribute", "-t", 1)):
        code, out, _ = mill(*words, *options)
        assert (code, out) == free[:2]
    assert allowed_cpus() == allowed
    code, _, err = mill(*words, "--cpu-range", f"{allowed[-1] + 1}-{allowed[-1] + 1}")
    assert code == 1
    assert err.startswith(f"ggufmill: this process may not use processor {allowed[-1] + 1}; it may use ")
    code, _, err = mill(*words, "--cpu-mask", f"{1 << allowed[0]:x}", "-t", 2)
    assert code == 0
    assert "2 threads on 1 processor wait for each other" in err
