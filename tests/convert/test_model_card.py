"""Model cards and metadata files -> general.* keys, compared with the gguf package's."""

import json

import gguf
import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.convert.model_card import card_metadata, file_metadata
from ggufmill.formats import FormatError, PlanError

CARD = """---
license: other
license_name: deepseek
license_link: LICENSE
base_model:
  - meta-llama/Llama-3.1-8B-Instruct
  - https://huggingface.co/Qwen/Qwen3-8B
tags:
  - merge
  - no
language: [en, "no"]
pipeline_tag: text-generation
datasets:
  - HuggingFaceFW/fineweb-edu
author: Somebody
version: v1.2
quantized_by: somebody else
---
# Model
---
license: not this one
---
"""


def reference(folder):
    """The metadata that the gguf package makes of the card."""
    card = gguf.Metadata.load_model_card(folder)
    metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, None, None, 0)
    metadata.name = metadata.name or "x"
    writer = gguf.GGUFWriter(None, "llama")
    metadata.set_gguf_meta_model(writer)
    return {key: value.value for key, value in writer.kv_data[0].items()}


def test_card_metadata_equals_the_gguf_packages(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    notes = []
    metadata = card_metadata(tmp_path, notes)
    expected = reference(tmp_path)
    for key in ("general.quantized_by", "general.architecture"):
        expected.pop(key, None)
    if "general.name" not in metadata:
        expected.pop("general.name")
    assert {k: v.item() if isinstance(v, np.generic) else v for k, v in metadata.items()} == expected
    assert metadata["general.license"] == "other"
    assert metadata["general.base_model.count"] == 2
    assert metadata["general.base_model.0.repo_url"] == "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct"
    assert metadata["general.tags"] == ["merge", "no", "text-generation"]
    assert metadata["general.languages"] == ["en", "no"]
    assert not notes


@pytest.mark.parametrize(
    "text", ["", "# no front matter\n---\nlicense: mit\n---\n", "---\n- a\n- list\n---\n", "---\nlicense: mit\n"]
)
def test_cards_without_front_matter(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert card_metadata(tmp_path, []) == {}


@pytest.mark.parametrize("text", ["---\nlicense: [\n---\n", "---\nbase_model: 5\ntags: {a: 1}\n---\n", "---\n\x00\n---\n"])
def test_malformed_cards_are_noted(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    notes = []
    card_metadata(tmp_path, notes)
    assert all("model card" in note and "\n" not in note for note in notes)


def test_no_card(tmp_path):
    assert card_metadata(tmp_path, []) == {}


def test_a_source_has_the_cards_metadata(tmp_path, write_checkpoint, tiny_llama):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama())
    (folder / "README.md").write_text(CARD)
    metadata = open_source(folder).metadata
    assert metadata["general.license.name"] == "deepseek"
    assert metadata["general.name"] == "m"
    assert "general.quantized_by" not in metadata
    assert metadata["general.size_label"].endswith("K")


def test_metadata_file(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(
        json.dumps(
            {
                "general.name": "Tiny",
                "general.quantized_by": "me",
                "general.tags": ["a"],
                "general.base_models": [{"name": "Base", "organization": "Org"}],
                "x.count": 7,
                "x.scale": 0.5,
                "x.flag": True,
                "x.list": [1, 2],
                "x.big": -5,
            }
        )
    )
    metadata = file_metadata(path)
    assert metadata == {
        "x.count": np.uint32(7),
        "x.scale": np.float32(0.5),
        "x.flag": True,
        "x.list": pytest.approx(np.array([1, 2])),
        "x.big": np.int64(-5),
        "general.name": "Tiny",
        "general.quantized_by": "me",
        "general.base_model.count": 1,
        "general.base_model.0.name": "Base",
        "general.base_model.0.organization": "Org",
        "general.tags": ["a"],
    }
    assert type(metadata["x.count"]) is np.uint32


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"general.architecture": "x"}', PlanError),
        ('{"split.count": 2}', PlanError),
        ('{"general.name": {"a": 1}}', FormatError),
        ('{"general.base_models": ["a"]}', FormatError),
        ('{"x": null}', FormatError),
        ('{"x": []}', FormatError),
        ('{"x": [1, "a"]}', FormatError),
        ("[]", FormatError),
        ("{", FormatError),
    ],
)
def test_metadata_files_that_are_refused(tmp_path, content, error):
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(error, match=r"m\.json"):
        file_metadata(path)
