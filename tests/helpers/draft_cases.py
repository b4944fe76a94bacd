"""Checkpoints with draft layers (multi-token prediction) in the published layouts, and what modelling code makes of them.

transformers drops these weights when it loads a checkpoint. So a draft layer's tensors are those of a model of one layer,
under the names that the checkpoints have, and its predictions are that model's for embeddings that are computed here by the
paper's formula (DeepSeek-V3, arXiv:2412.19437, section 2.2): eh_proj @ [RMSNorm(embedding), RMSNorm(hidden state)].
"""

import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
from checkpoint_cases import LENGTH, new_config, oracle, randomise, save_tokenizer, write_gguf
from model_cases import CASES
from model_cases.common import COMMON
from safetensors.numpy import load_file, save_file

from ggufmill.convert import open_source


@dataclass(frozen=True)
class Layout:
    """What a checkpoint calls its draft layers.

    names     of the parts: eh_proj, enorm, hnorm and norm; embed and head, where each layer has its own
    parts     prefix of these; layer: of the layer's own tensors; {at}: its number behind the model's, {number}: its own
    plus_one  norms are stored less 1
    unnormed  the hidden state is the residual stream, not the output of the last norm
    chained   each layer reads the hidden states of the one before; else all read the model's
    renames   of parts of tensors' names
    """

    names: dict
    parts: str = "model.layers.{at}."
    layer: str = "model.layers.{at}."
    plus_one: bool = False
    unnormed: bool = False
    chained: bool = True
    renames: dict = field(default_factory=dict)

    @property
    def is_shared(self):
        """Whether all layers have the same parts."""
        return "{" not in self.parts


@dataclass(frozen=True)
class Row:
    """changes: of the config, for a model that is one draft layer; config: changes of config.json; case: of CASES."""

    changes: dict
    layout: Layout
    config: dict
    count: int = 1
    case: str = ""


ONE_LAYER = {"num_hidden_layers": 1}
SPARSE = ONE_LAYER | {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
ATTENTION = ONE_LAYER | {"layer_types": ["full_attention"], "full_attention_interval": 1}
LOCAL = ONE_LAYER | {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
PARTS = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm"}
DEEPSEEK = Layout(PARTS | {"norm": "shared_head.norm", "embed": "embed_tokens", "head": "shared_head.head"})
GLM = Layout(PARTS | {"norm": "shared_head.norm"})
LING = Layout(PARTS | {"norm": "final_layernorm"})
BESIDE = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
LING_3 = replace(LING)  # the same names, of layers that transformers has
QWEN = Layout(BESIDE, "mtp.", "mtp.layers.{number}.", plus_one=True)
EXAONE = Layout(BESIDE, "mtp.", "mtp.layers.{number}.")
MIMO = Layout(
    PARTS | {"norm": "final_layernorm"},
    *["model.mtp.layers.{number}."] * 2,
    unnormed=True,
    chained=False,
    renames={"post_attention_layernorm": "pre_mlp_layernorm"},
)
STEP = Layout(
    PARTS | {"norm": "transformer.shared_head.norm", "head": "transformer.shared_head.output"}, plus_one=True, unnormed=True
)
STEP_DRAFT = LOCAL | {"rope_theta": [1e4], "partial_rotary_factors": [1.0], "swiglu_limits": None, "swiglu_limits_shared": None}
STEP_DRAFT |= {"mlp_layer_types": ["sparse"]}
STEP_TYPES = {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["sparse"] * 2}
LING_CONFIG = {"architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32}
LING_CONFIG |= {"num_shared_experts": 1, "moe_intermediate_size": 40, "norm_topk_prob": True, "rope_theta": 10000.0}
LING_CONFIG |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "score_function": "sigmoid", "use_qk_norm": True}
LING_CONFIG |= {"partial_rotary_factor": 0.5, "rope_parameters": None, "model_type": "bailing_moe"}
LING_CONFIG |= {"moe_shared_expert_intermediate_size": 40}
ONE, TWO = {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 2}
DRAFT_CASES = {
    "v3": Row(SPARSE, DEEPSEEK, ONE),
    "v3-mainline": Row(SPARSE, DEEPSEEK, ONE),
    "v3-two": Row(SPARSE, DEEPSEEK, TWO, 2, "v3-mainline"),
    "deepseek32": Row(SPARSE, DEEPSEEK, ONE),
    "glm4-moe-lite": Row(SPARSE, DEEPSEEK, ONE),
    "glm-dsa": Row(SPARSE | {"indexer_types": ["full"]}, DEEPSEEK, ONE),
    "glm4moe": Row(SPARSE, GLM, ONE),
    "glm4moe-groups": Row(SPARSE, DEEPSEEK, ONE),
    "glm4moe-three": Row(SPARSE, GLM, {"num_nextn_predict_layers": 3}, 3, "glm4moe"),
    "bailingmoe2": Row(SPARSE, LING, LING_CONFIG | ONE, case="glm4moe"),
    "bailingmoe2-two": Row(SPARSE, LING, LING_CONFIG | TWO, 2, "glm4moe"),
    "ling3": Row(SPARSE | {"layer_types": ["full_attention"]}, LING_3, ONE),
    "ling3-two": Row(SPARSE | {"layer_types": ["full_attention"]}, LING_3, TWO, 2, "ling3"),
    "qwen3next": Row(ATTENTION, QWEN, {}),
    "qwen35": Row(ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen35-odd": Row(ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen35moe": Row(ATTENTION, QWEN, {"mtp_num_hidden_layers": 1}),
    "mimo2": Row(LOCAL, MIMO, {}, 3),
    "mimo2-groups": Row(LOCAL | {"n_group": 1, "topk_group": 1}, MIMO, {}),
    "exaone-moe": Row(LOCAL, EXAONE, ONE),
    "exaone-moe-groups": Row(
        LOCAL | {"layer_types": ["full_attention"]}, EXAONE, TWO | {"mtp_layer_types": ["full_attention"] * 2}, 2
    ),
    "step35": Row(STEP_DRAFT, STEP, TWO | STEP_TYPES, 2),
    "step35-limits": Row(STEP_DRAFT | {"mlp_layer_types": ["dense"]}, STEP, ONE | {"mtp_layer_types": ["sliding_attention"]}),
}


@dataclass
class DraftCase:
    """tokens int [n]; logits of the model float32 [n, vocab], of its draft layer d [n - 1 - d, vocab]; path of the GGUF."""

    tokens: np.ndarray
    logits: np.ndarray
    draft_logits: list
    path: object
    folder: object


def _model(case, changes, seed=1):
    _, transformers = oracle()
    family, options, *_ = CASES[case]
    known = new_config(transformers, family, COMMON | options)[1].get_text_config().to_dict()
    kept = {k: v for k, v in changes.items() if k in known or k in options or k in COMMON}
    architecture, config = new_config(transformers, family, COMMON | options | kept)
    return randomise(architecture(config), seed)


def rms(x, weight, epsilon):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * weight


def _run(model, unnormed, **inputs):
    """(logits, hidden states) of a model: the input or the output of its last norm."""
    kept = {}
    handle = model.get_decoder().norm.register_forward_hook(lambda norm, x, y: kept.update(before=x[0], after=y))
    logits = model(**inputs).logits[0].numpy()
    handle.remove()
    return logits, kept["before" if unnormed else "after"][0].numpy()


def _as_ling(stored, layers):
    """The tensors of a GLM-4.5 under the names of Ling 2, whose modelling code is beside its checkpoints only."""
    names = {"model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense"}
    names |= {"self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm"}
    names |= {"mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"}
    out = {}
    for name, tensor in stored.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "self_attn" not in name:
            out[name] = tensor
    for i in range(layers):
        parts = [stored[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        out[f"model.layers.{i}.attention.query_key_value.weight"] = np.concatenate(parts)
    return out


def with_draft_block(source):
    """The source with one more block, which the metadata call a draft layer: a copy of the last one, times three."""
    prefix, metadata, tensors = f"{source.architecture}.", dict(source.metadata), dict(source.tensors)
    count = int(metadata[f"{prefix}block_count"])
    for key, value in metadata.items():
        if key.startswith(prefix) and np.ndim(value) == 1 and len(value) == count:
            metadata[key] = np.append(value, value[-1:])
    metadata[f"{prefix}block_count"], metadata[f"{prefix}nextn_predict_layers"] = np.uint32(count + 1), np.uint32(1)
    for name, tensor in source.tensors.items():
        if name.startswith(f"blk.{count - 1}."):
            read = lambda start, stop, tensor=tensor: 3 * tensor.read(start, stop)  # noqa: E731
            copy = replace(tensor, name=name.replace(f"blk.{count - 1}.", f"blk.{count}."), read=read)
            tensors[copy.name] = copy
    return replace(source, metadata=metadata, tensors=tensors)


def convert_draft_case(name, folder, *, copies_first_layer=False, **options):
    """Makes, saves and converts the case's model with its draft layers; options: of `open_source`.

    copies_first_layer: each draft layer is the model's only layer, and eh_proj takes its embeddings, which have a norm of 1
    each: so it predicts what the model does, but for what the first tokens add."""
    torch, _ = oracle()
    row = DRAFT_CASES[name]
    case, layout = row.case or name, row.layout
    ling = {"attention_bias": False, "n_shared_experts": 1} if layout is LING else {}
    main = _model(case, ling | (row.changes if copies_first_layer else {}))
    drafts = [_model(case, ling | row.changes, 1 if copies_first_layer else 2 + number) for number in range(row.count)]
    n, random = COMMON["hidden_size"], np.random.default_rng(7)
    stored, draft_logits = {}, []
    folder.mkdir(exist_ok=True)
    with torch.no_grad():
        embedding = main.get_input_embeddings().weight
        if copies_first_layer:
            embedding.div_(embedding.square().mean(-1, keepdim=True).sqrt())
        tokens = random.integers(3, COMMON["vocab_size"], LENGTH)
        logits, main_states = _run(main, layout.unnormed, input_ids=torch.tensor(tokens[None]))
        config = main.config.get_text_config()
        states, layers, epsilon = main_states, config.num_hidden_layers, config.rms_norm_eps
        for number, draft in enumerate(drafts):
            if number == 0 or not layout.is_shared:
                parts = {part: 1 + 0.2 * random.standard_normal(n) - layout.plus_one for part in ("enorm", "hnorm")}
                parts["eh_proj"] = random.standard_normal((n, 2 * n)) / math.sqrt(2 * n)
            if copies_first_layer:
                parts["enorm"] = np.full(n, 1.0 - layout.plus_one)
                parts["eh_proj"] = np.concatenate([np.eye(n), np.zeros((n, n))], 1)
                draft.load_state_dict(main.state_dict())
            if "embed" not in layout.names:
                draft.get_input_embeddings().weight.copy_(embedding)
            if "head" not in layout.names:
                draft.lm_head.weight.copy_(main.lm_head.weight)
            if layout.is_shared:
                draft.get_decoder().norm.weight.copy_(drafts[0].get_decoder().norm.weight)
            inputs = tokens[number + 1 :]
            e = rms(draft.get_input_embeddings().weight.numpy()[inputs], parts["enorm"] + layout.plus_one, epsilon)
            before = states if layout.chained else main_states
            h = rms(before[: len(inputs)], parts["hnorm"] + layout.plus_one, epsilon)
            x = np.concatenate([e, h], axis=1) @ parts["eh_proj"].T
            own, states = _run(draft, layout.unnormed, inputs_embeds=torch.tensor(x[None], dtype=torch.float32))
            draft_logits.append(own)
            at = folder / f"draft-{number}"
            draft.save_pretrained(at)
            state = load_file(at / "model.safetensors")
            top, layer = (text.format(at=layers + number, number=number) for text in (layout.parts, layout.layer))
            stored |= {f"{top}{layout.names[part]}.weight": np.asarray(value, np.float32) for part, value in parts.items()}
            for tensor, value in state.items():
                if ".layers.0." in tensor:
                    tensor = tensor.split(".layers.0.")[1]
                    for theirs, ours in layout.renames.items():
                        tensor = tensor.replace(theirs, ours)
                    stored[layer + tensor] = value
            for part, tensor in (("norm", "model.norm"), ("embed", "model.embed_tokens"), ("head", "lm_head")):
                if part in layout.names:
                    given = f"{tensor}.weight" if f"{tensor}.weight" in state else "model.embed_tokens.weight"
                    stored[f"{top}{layout.names[part]}.weight"] = state[given]
    main.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors") | stored
    config = json.loads((folder / "config.json").read_text())
    changed = config.get("text_config", config)
    same = {key: value for key, value in row.changes.items() if copies_first_layer and key in row.config}
    for key, value in (row.config | same).items():  # the types of Step's draft layers stand behind those of the others
        changed[key] = changed[key] + value if layout is STEP and changed.get(key) and isinstance(value, list) else value
    if layout is LING:
        stored = _as_ling(stored, layers + row.count)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder / "tokenizer.json")
    layout_options = CASES[case][2:] or ("ik",)
    source = open_source(folder, **{"mla_layout": layout_options[0], "mtp": True} | options)
    path = write_gguf(source, folder / "model.gguf")[0]
    return DraftCase(tokens, logits, draft_logits, path, folder)
