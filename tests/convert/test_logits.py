"""The whole way, checkpoint -> GGUF -> runtime, against transformers on the same random weights."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ggufmill.convert import open_source
from ggufmill.formats.execute import execute, preflight
from ggufmill.formats.plan import Output, make_plan
from ggufmill.formats.types import TYPES
from ggufmill.runtime import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
COMMON = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
}
LLAMA = COMMON | {"num_hidden_layers": 2, "num_key_value_heads": 2, "attention_bias": True}
DEEPSEEK = COMMON | {"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
DEEPSEEK |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 2, "n_shared_experts": 2}
CASES = {
    "llama": ("Llama", LLAMA | {"rope_parameters": LLAMA3}, ("ik",)),
    "llama-yarn": ("Llama", LLAMA | {"rope_parameters": YARN, "tie_word_embeddings": True}, ("ik",)),
    "v3": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": 32, "n_group": 4, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        ("ik", "mainline", "legacy"),
    ),
    "v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}, ("ik",)),
    "v2": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": 32, "n_group": 4, "topk_method": "group_limited_greedy"}, ("mainline",)),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_tokenizer(path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["hello"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path))


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    family, settings, layouts = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
        tokens = torch.randint(0, 288, (1, 90))
        expected = model(tokens).logits[0].numpy()
    model.save_pretrained(tmp_path / case)
    save_tokenizer(tmp_path / case / "tokenizer.json")
    for layout in layouts:
        source = open_source(tmp_path / case, mla_layout=layout)
        outputs = [
            Output(t.name, t.shape, t.source_type, TYPES["f32"], "test", lambda a, b, t=t: t.read(a, b).view(np.uint8))
            for t in source.tensors.values()
        ]
        plan = make_plan(outputs, source.metadata, tmp_path / f"{layout}.gguf")
        preflight(plan)
        execute(plan, threads=1)
        got = np.asarray(load_model(tmp_path / f"{layout}.gguf").logits(tokens[0].tolist()))
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
