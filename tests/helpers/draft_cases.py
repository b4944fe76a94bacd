"""Checkpoints with draft layers (multi-token prediction) in the published layouts, and what modelling code makes of them.

transformers drops these weights when it loads a checkpoint. So the draft block's tensors are those of a model of one layer,
under the names that the checkpoints have, and its predictions are that model's for embeddings that are computed here by the
paper's formula (DeepSeek-V3, arXiv:2412.19437, section 2.2): eh_proj @ [RMSNorm(embedding), RMSNorm(hidden state)].
"""

import json
import math
from dataclasses import dataclass

import numpy as np
from checkpoint_cases import LENGTH, oracle, randomise, save_tokenizer, write_gguf
from model_cases import CASES
from model_cases.common import COMMON
from safetensors.numpy import load_file, save_file

from ggufmill.convert import open_source

ONE_LAYER = {"num_hidden_layers": 1}
SPARSE = ONE_LAYER | {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
ATTENTION = ONE_LAYER | {"layer_types": ["full_attention"], "full_attention_interval": 1}
DEEPSEEK = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
DEEPSEEK |= {"embed": "embed_tokens", "head": "shared_head.head"}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
# case -> (changes of the config for one layer, names in the checkpoint, changes of config.json)
DRAFT_CASES = {
    "v3": (SPARSE, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "v3-mainline": (SPARSE, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "deepseek32": (SPARSE, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "glm4-moe-lite": (SPARSE, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "glm-dsa": (SPARSE | {"indexer_types": ["full"]}, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "glm4moe": (SPARSE, {k: DEEPSEEK[k] for k in QWEN}, {"num_nextn_predict_layers": 1}),
    "glm4moe-groups": (SPARSE, DEEPSEEK, {"num_nextn_predict_layers": 1}),
    "qwen3next": (ATTENTION, QWEN, {}),
    "qwen35": (ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen35-odd": (ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen35moe": (ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
}


@dataclass
class DraftCase:
    """tokens int [n]; logits of the model float32 [n, vocab], of its draft layer [n - 1, vocab]; path of the GGUF."""

    tokens: np.ndarray
    logits: np.ndarray
    draft_logits: np.ndarray
    path: object
    folder: object


def _model(case, changes):
    _, transformers = oracle()
    family, options, *_ = CASES[case]
    architecture = getattr(transformers, f"{family}ForCausalLM")
    known = architecture.config_class().to_dict()
    values = COMMON | options | {k: v for k, v in changes.items() if k in known or k in options or k in COMMON}
    return randomise(architecture(architecture.config_class(**values, attn_implementation="eager")))


def rms(x, weight, epsilon):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * weight


def convert_draft_case(case, folder, *, copies_first_layer=False, **options):
    """Makes, saves and converts the case's model with a draft layer; options: of `open_source`.

    copies_first_layer: the draft layer is the model's only layer, and eh_proj takes its embeddings, which have a norm of 1
    each: so it predicts what the model does, but for what the first token adds."""
    torch, _ = oracle()
    changes, names, config_changes = DRAFT_CASES[case]
    main = _model(case, changes if copies_first_layer else {})
    draft = _model(case, changes)
    n, random = COMMON["hidden_size"], np.random.default_rng(7)
    plus_one = 1.0 if names is QWEN else 0.0  # Qwen stores what is added to 1
    parts = {part: 1 + 0.2 * random.standard_normal(n) - plus_one for part in ("enorm", "hnorm")}
    parts["eh_proj"] = random.standard_normal((n, 2 * n)) / math.sqrt(2 * n)
    with torch.no_grad():
        embedding = main.model.embed_tokens.weight
        if copies_first_layer:
            embedding.div_(embedding.square().mean(-1, keepdim=True).sqrt())
            parts["enorm"], parts["eh_proj"] = np.full(n, 1 - plus_one), np.concatenate([np.eye(n), np.zeros((n, n))], 1)
            draft.load_state_dict(main.state_dict())
        if "embed" not in names:
            draft.model.embed_tokens.weight.copy_(embedding)
        if "head" not in names:
            draft.lm_head.weight.copy_(main.lm_head.weight)
        tokens = random.integers(3, COMMON["vocab_size"], LENGTH)
        out = main(torch.tensor(tokens[None]), output_hidden_states=True)
        hidden = main.model(torch.tensor(tokens[None])).last_hidden_state[0].numpy()
        epsilon = main.config.get_text_config().rms_norm_eps
        e = rms(draft.model.embed_tokens.weight.numpy()[tokens[1:]], parts["enorm"] + plus_one, epsilon)
        h = rms(hidden[:-1], parts["hnorm"] + plus_one, epsilon)
        x = np.concatenate([e, h], axis=1) @ parts["eh_proj"].T
        draft_logits = draft(inputs_embeds=torch.tensor(x[None], dtype=torch.float32)).logits[0].numpy()
    folder.mkdir(exist_ok=True)
    main.save_pretrained(folder)
    draft.save_pretrained(folder / "draft")
    state, layers = load_file(folder / "draft" / "model.safetensors"), main.config.get_text_config().num_hidden_layers
    top = "mtp." if names is QWEN else f"model.layers.{layers}."
    layer = "mtp.layers.0." if names is QWEN else top
    stored = {f"{top}{names[part]}.weight": np.asarray(value, np.float32) for part, value in parts.items()}
    for name, value in state.items():
        if name.startswith("model.layers.0."):
            stored[layer + name.removeprefix("model.layers.0.")] = value
    for part, name in (("norm", "model.norm"), ("embed", "model.embed_tokens"), ("head", "lm_head")):
        if part in names:
            stored[f"{top}{names[part]}.weight"] = state.get(f"{name}.weight", state["model.embed_tokens.weight"])
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | config_changes))
    save_tokenizer(folder / "tokenizer.json")
    layout = CASES[case][2:] or ("ik",)
    source = open_source(folder, **{"mla_layout": layout[0], "mtp": True} | options)
    path = write_gguf(source, folder / "model.gguf")[0]
    return DraftCase(tokens, out.logits[0].numpy(), draft_logits, path, folder)
