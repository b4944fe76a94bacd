"""llama.cpp's own library loads our projector files and encodes with them (the `peer` extra with libmtmd; skipped without)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import oracle
from tower_checkpoints import save_tower

from ggufmill.recipes import FOLDER

SCRIPT = Path(__file__).parents[2] / "helpers" / "encode_with_mtmd.py"
# checkpoint -> what is encoded. llama.cpp counts 187 tokens of Ultravox and Voxtral, computes 188, and ends the process, with
# the files of its own converter, too: these two are loaded only
BOTH = ("vision", "audio")
MODALITIES = dict.fromkeys(("Gemma3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Mistral3"), BOTH[:1])
MODALITIES |= dict.fromkeys(("InternVL", "InternVL chat", "Kimi-VL", "Kimi-K2.5"), BOTH[:1])
MODALITIES |= {"Gemma4": BOTH, "Qwen2.5-Omni": BOTH, "Qwen2Audio": BOTH[1:], "Ultravox": (), "Voxtral": ()}
WIDTHS = {"Qwen3VL": 192}  # of embeddings: that of the text model, and one more for each deepstack layer


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """Makes a Llama of some width with the demo's vocabulary, as a GGUF."""
    pytest.importorskip("llama_cpp")
    try:
        import llama_cpp.mtmd_cpp  # noqa: F401
    except (ImportError, OSError, FileNotFoundError):
        pytest.skip("llama_cpp has no libmtmd")
    torch, transformers = oracle()
    made = {}

    def make(mill, width):
        if width not in made:
            folder = tmp_path_factory.mktemp("text")
            config = transformers.LlamaConfig(
                vocab_size=1536,
                hidden_size=width,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=1,
            )
            transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(FOLDER / "demo" / name, folder)
            assert mill("convert", folder, folder / "text.gguf")[0] == 0
            made[width] = folder / "text.gguf"
        return made[width]

    return make


@pytest.mark.parametrize("name", MODALITIES)
def test_the_library_loads_the_file_and_encodes_with_it(mill, tmp_path, text_model, name):
    text = text_model(mill, WIDTHS.get(name, 64))
    (tmp_path / "model").mkdir()
    save_tower(name, tmp_path / "model")
    results = {}
    for outtype in ("f16", "q8_0"):
        projector = tmp_path / f"{outtype}.gguf"
        assert mill("convert", tmp_path / "model", projector, "--mmproj", "--outtype", outtype)[0] == 0
        command = [sys.executable, SCRIPT, text, projector, *MODALITIES[name]]
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(list(map(str, command)), capture_output=True, env=environment, timeout=300, check=False)
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:]
        results[outtype] = json.loads(done.stdout)
    for modality in MODALITIES[name]:
        exact, coarse = results["f16"][modality], results["q8_0"][modality]
        assert exact["finite"]
        assert coarse["finite"]
        assert exact["tokens"] == coarse["tokens"] > 0
        assert abs(exact["spread"] - coarse["spread"]) <= 0.02 * exact["spread"]
        assert exact["tokens"] == 1 or exact["spread"] > 1e-3  # the picture is seen
