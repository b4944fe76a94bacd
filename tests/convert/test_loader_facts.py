"""What llama.cpp does otherwise with the tests' models, `inspect --for llama.cpp` says of the files that they become."""

import pytest
from checkpoint_cases import new_config, oracle
from model_cases import BEYOND_LLAMA_CPP, CASES
from model_cases.common import COMMON

from ggufmill.convert import open_source
from ggufmill.formats import TYPES
from ggufmill.formats.loader_facts import LoaderTensor
from ggufmill.formats.loaders import loader_differences, loader_problems

# Cases in which the tests' text, or another config that they take for llama.cpp, does not show what is said.
NOT_SHOWN = ("llama-yarn-factor", "ministral-short", "qwen4exp", "qwen4exp-odd", "qwen4exp-plain")


@pytest.mark.parametrize("case", [case for number, case in enumerate(CASES) if case in BEYOND_LLAMA_CPP or number % 5 == 0])
def test_what_llama_cpp_does_otherwise_is_said(tmp_path, case):
    _, transformers = oracle()
    family, options, *layout = CASES[case]
    architecture, config = new_config(transformers, family, COMMON | options)
    architecture(config).save_pretrained(tmp_path)
    source = open_source(tmp_path, mla_layout=layout[0] if layout else "ik")
    headers = {name: LoaderTensor(tensor.shape, TYPES["f32"]) for name, tensor in source.tensors.items()}
    said = [find(source.metadata, headers, "llama.cpp") for find in (loader_problems, loader_differences)]
    if case not in NOT_SHOWN:
        assert any(said) == (case in BEYOND_LLAMA_CPP), said
