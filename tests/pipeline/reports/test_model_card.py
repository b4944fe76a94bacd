"""The draft of a model card: front matter as the Hub reads it, and commands only of programs that load the file."""

import pytest
import yaml

from ggufmill.formats import TYPES
from ggufmill.formats.loader_facts import LoaderTensor
from ggufmill.formats.loaders import PROGRAMS, loader_problems
from ggufmill.pipeline.reports.model_card import _choice, card_text


@pytest.fixture
def report():
    """Of a run: (type of the tensors, other values) -> its report."""

    def of(kind="q4_k", architecture="llama", **changes):
        tensors = {"output.weight": LoaderTensor((256, 256), TYPES[kind])}
        return {
            **{
                "recipe": "all.toml",
                "label": "",
                "failures": [],
                "files": ["/x/small.gguf"],
                "architecture": architecture,
                "search": None,
            },
            **{"version": "1", "bits_per_weight": 4.5, "file_bytes": 5 << 30, "total_bytes": 5 << 30, "rules": "", "roles": {}},
            **{"source_name": "demo", "name": "Demo 3B", "validation": None, "imatrix": None, "report": "/x/report.html"},
            "card": {"base_model": "someone/demo", "license": "mit", "pipeline_tag": "text-generation"},
            "types": {kind: {"tensors": 1, "nbytes": 5 << 30}},
            "loaders": {
                one: loader_problems({"general.architecture": architecture}, tensors, one, len(changes.get("files", "1")))
                for one in PROGRAMS
            },
            **changes,
        }

    return of


def test_front_matter(report):
    _, front, text = card_text(report()).split("---\n", 2)
    values = yaml.safe_load(front)
    assert values == {
        **{"library_name": "gguf", "base_model": "someone/demo", "base_model_relation": "quantized", "license": "mit"},
        **{"pipeline_tag": "text-generation", "tags": ["gguf", "quantized"]},
    }
    assert "# Demo 3B GGUF\n" in text
    card = {"tags": ["text-generation", "math"], "pipeline_tag": "text-generation", "quantized_by": "me"}
    values = yaml.safe_load(card_text(report(card=card)).split("---\n", 2)[1])
    assert (values["quantized_by"], values["tags"]) == ("me", ["gguf", "quantized", "math"])
    assert "base_model_relation" not in values


def test_commands_of_all_that_load_the_file(report):
    text = card_text(report())
    for command in (
        *("llama-server -hf OWNER/NAME", "llama-server -m small.gguf", "ollama run hf.co/OWNER/NAME", "lms get https://"),
        *("ggufmill serve small.gguf", "\nik_llama.cpp:\n"),
    ):
        assert command in text
    assert "does not load it" not in text
    split = card_text(report(files=["/x/small-00001-of-00002.gguf", "/x/small-00002-of-00002.gguf"]))
    assert "ollama" not in split
    assert "llama-server -m small-00001-of-00002.gguf" in split


def test_no_commands_of_what_does_not_load_the_file(report):
    text = card_text(report("iq4_k_r4"))
    assert "llama.cpp does not load it: it does not know the tensor types iq4_k_r4." in text
    assert text.count("llama-server") == 1
    assert "ik_llama.cpp:\n\n```sh\nllama-server -m small.gguf" in text
    assert not any(word in text for word in ("-hf", "ollama run", "lms get", "OWNER/NAME"))
    text = card_text(report("q4_k", "olmo2"))
    assert "ik_llama.cpp does not load it: it does not know the architecture 'olmo2'" in text
    assert "ik_llama.cpp:\n" not in text
    text = card_text(report("q4_k", "longcat-flash"))
    assert "llama-server" not in text
    assert "ggufmill generate small.gguf" in text


def test_a_model_of_embeddings(report):
    text = card_text(report(card={"pipeline_tag": "feature-extraction"}))
    assert "llama-server --embedding -m small.gguf" in text
    assert "ggufmill embed small.gguf -p" in text
    assert "ggufmill generate" not in text
    assert "llama-server --reranking -m small.gguf" in card_text(report(card={"pipeline_tag": "text-ranking"}))


def test_the_table(report):
    assert "| model | size | bits/weight |\n" in card_text(report())
    v = {
        **{"baseline": "bf16", "baseline_bytes": 16 << 30, "baseline_bits": 16.0, "baseline_perplexity": 7.1, "error": 0.05},
        **{"perplexity": 7.2, "kld_mean": 0.0123, "kld_error": 0.0004, "top1_agreement": 93.2, "ratio": 1.01, "chunks": 9},
        **{"kld_median": 0.01, "kld_p99": 0.2, "kld_max": 1.5, "n_ctx": 512, "tokens_scored": 99},
    }
    text = card_text(report(validation=v))
    assert "| small.gguf | 5.000 GiB | 4.500 | 7.2000 ± 0.0500 | 0.01230 ± 0.00040 | 93.20 % |" in text


def test_a_card_of_several_files_says_which_to_take(report):
    def quant(name, size, kld):
        return report(files=[f"/x/{name}.gguf"], file_bytes=size << 30, validation={"kld_mean": kld})

    [text, _] = _choice([quant("small", 2, 0.03), quant("large", 5, 0.01), quant("medium", 3, 0.02)])
    assert text.startswith("Take the largest file that fits your memory")
    assert "from `large.gguf` (5.000 GiB) down to `small.gguf` (2.000 GiB)" in text
    assert text.endswith("whose KL divergence from the baseline is 3.0 times as large.")
    assert _choice([quant("only", 2, 0.03)]) == []
    assert "times" not in _choice([report(file_bytes=1), report(file_bytes=2)])[0]
