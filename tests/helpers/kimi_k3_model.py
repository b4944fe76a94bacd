"""Kimi K3's text model in numpy, from its definition: config, weights by the names of the checkpoint, logits."""

import json

import numpy as np
from recorded_models import draw
from safetensors.numpy import save_file

LENGTH = 60
LINEAR = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
TEXT = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "situ",
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 2.0,
    "attn_res_block_size": 2,
    "linear_attn_config": LINEAR | {"full_attn_layers": [3, 6], "kda_layers": [1, 2, 4, 5]},
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 40,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A block that is not whole, queries without a latent, experts at full width, no gate, no lower bound.
ODD = TEXT | {"attn_res_block_size": 5, "q_lora_rank": None, "routed_expert_hidden_size": None, "first_k_dense_replace": 2}
ODD |= {"mla_use_output_gate": False, "moe_renormalize": False, "num_experts_per_token": 3, "num_shared_experts": 1}
ODD |= {"linear_attn_config": LINEAR | {"full_attn_layers": [1, 4], "kda_layers": [2, 3, 5, 6], "gate_lower_bound": None}}
CONFIGS = {"kimi-k3": TEXT, "kimi-k3-odd": ODD}
MLP, EXPERT = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def write_checkpoint(config, folder):
    """A random model under the names of the published checkpoint, a tower of images beside it. Returns its weights."""
    weights = {name: draw(name, shape, mean) for name, (shape, mean) in _shapes(config).items()}
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("[UNK]\n")
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {}}))
    tower = {"vision_tower.patch_embed.proj.weight": np.zeros((4, 4), np.float32)}
    save_file({f"language_model.{name}": x for name, x in weights.items()} | tower, folder / "model.safetensors")
    return weights


def _shapes(c):
    """Name -> (shape, mean of a vector's numbers)."""
    hidden, n, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    nope, rope, v_width, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    settings, q_rank, latent = c["linear_attn_config"], c["q_lora_rank"], c["routed_expert_hidden_size"]
    matrices = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.output_attn_res_proj": (1, hidden)}
    norms, others = {"model.norm": hidden, "model.output_attn_res_norm": hidden}, {}

    def mlp(prefix, names, rows, width):
        matrices.update({f"{prefix}.{name}": (rows, width) for name in names[:2]} | {f"{prefix}.{names[2]}": (width, rows)})

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention, moe = f"{layer}.self_attn", f"{layer}.block_sparse_moe"
        for name in ("self_attention_res", "mlp_res"):
            matrices[f"{layer}.{name}_proj"], norms[f"{layer}.{name}_norm"] = (1, hidden), hidden
        norms |= {f"{layer}.input_layernorm": hidden, f"{layer}.post_attention_layernorm": hidden}
        if i + 1 in settings["full_attn_layers"]:
            rows = n * (nope + rope)
            own = {"kv_a_proj_with_mqa": (rank + rope, hidden), "kv_b_proj": (n * (nope + v_width), rank)}
            own |= {"q_a_proj": (q_rank, hidden), "q_b_proj": (rows, q_rank)} if q_rank else {"q_proj": (rows, hidden)}
            own |= {"g_proj": (n * v_width, hidden)} if c["mla_use_output_gate"] else {}
            own["o_proj"] = (hidden, n * v_width)
            norms |= {f"{attention}.kv_a_layernorm": rank} | ({f"{attention}.q_a_layernorm": q_rank} if q_rank else {})
        else:
            width, size = settings["head_dim"], n * settings["head_dim"]
            own = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (size, hidden)), "o_proj": (hidden, size)}
            own |= {"f_a_proj": (width, hidden), "f_b_proj": (size, width), "b_proj": (n, hidden)}
            own |= dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (size, 1, settings["short_conv_kernel_size"]))
            norms[f"{attention}.o_norm"] = width
            others |= {f"{attention}.A_log": ((n,), 0), f"{attention}.dt_bias": ((size,), 0)}
        matrices |= {f"{attention}.{name}": shape for name, shape in own.items()}
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", MLP, c["intermediate_size"], hidden)
            continue
        matrices[f"{moe}.gate"] = (c["num_experts"], hidden)
        others[f"{moe}.gate.e_score_correction_bias"] = ((c["num_experts"],), 0)
        mlp(f"{moe}.shared_experts", MLP, c["num_shared_experts"] * c["moe_intermediate_size"], hidden)
        for expert in range(c["num_experts"]):
            mlp(f"{moe}.experts.{expert}", EXPERT, c["moe_intermediate_size"], latent or hidden)
        if latent:
            matrices |= {f"{moe}.routed_expert_down_proj": (latent, hidden), f"{moe}.routed_expert_up_proj": (hidden, latent)}
            norms[f"{moe}.routed_expert_norm"] = latent
    weights = {f"{name}.weight": (shape, 0) for name, shape in matrices.items()}
    return weights | {f"{name}.weight": ((size,), 1) for name, size in norms.items()} | others


class KimiK3:
    """logits(tokens): float64 [tokens, vocabulary], all tokens at once."""

    def __init__(self, config, weights):
        self.config, self.weights = config, {name: np.asarray(x, np.float64) for name, x in weights.items()}

    def logits(self, tokens):
        c = self.config
        stream, bank = self.weights["model.embed_tokens.weight"][tokens], []
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            h = self.norm(self.mean_of(stream, bank, f"{layer}.self_attention_res"), f"{layer}.input_layernorm")
            is_full = i + 1 in c["linear_attn_config"]["full_attn_layers"]
            attended = (self.latent_attention if is_full else self.delta_attention)(h, f"{layer}.self_attn")
            if i % c["attn_res_block_size"] == 0:
                bank.append(stream)
                stream = attended
            else:
                stream = stream + attended
            h = self.norm(self.mean_of(stream, bank, f"{layer}.mlp_res"), f"{layer}.post_attention_layernorm")
            is_dense = i < c["first_k_dense_replace"]
            stream = stream + (self.gated(h, f"{layer}.mlp") if is_dense else self.experts(h, f"{layer}.block_sparse_moe"))
        return self.linear(self.norm(self.mean_of(stream, bank, "model.output_attn_res"), "model.norm"), "lm_head")

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def mean_of(self, stream, bank, name):
        """Of the sums of earlier blocks and the running one, by softmax."""
        if not bank:
            return stream
        sums = np.stack([*bank, stream])
        scores = self.linear(self.norm(sums, f"{name}_norm"), f"{name}_proj")[..., 0]
        return (softmax(scores.T).T[..., None] * sums).sum(0)

    def situ(self, gate, up):
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)

    def gated(self, x, prefix, names=MLP):
        gate, up, down = (f"{prefix}.{name}" for name in names)
        return self.linear(self.situ(self.linear(x, gate), self.linear(x, up)), down)

    def experts(self, x, prefix):
        c = self.config
        scores = sigmoid(self.linear(x, f"{prefix}.gate"))
        chosen = np.argsort(-(scores + self.weights[f"{prefix}.gate.e_score_correction_bias"]), axis=1)
        chosen = chosen[:, : c["num_experts_per_token"]]
        factors = np.take_along_axis(scores, chosen, axis=1)
        if c["moe_renormalize"]:
            factors = factors / factors.sum(1, keepdims=True)
        latent = self.linear(x, f"{prefix}.routed_expert_down_proj") if c["routed_expert_hidden_size"] else x
        routed = np.zeros_like(latent)
        for token in range(len(x)):
            for expert, factor in zip(chosen[token], factors[token] * c["routed_scaling_factor"], strict=True):
                routed[token] += factor * self.gated(latent[token], f"{prefix}.experts.{expert}", EXPERT)
        if c["routed_expert_hidden_size"]:
            routed = self.linear(self.norm(routed, f"{prefix}.routed_expert_norm"), f"{prefix}.routed_expert_up_proj")
        return routed + self.gated(x, f"{prefix}.shared_experts")

    def latent_attention(self, x, prefix):
        c, (tokens, _), n = self.config, x.shape, self.config["num_attention_heads"]
        nope, rope, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        if c["q_lora_rank"]:
            q = self.linear(self.norm(self.linear(x, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm"), f"{prefix}.q_b_proj")
        else:
            q = self.linear(x, f"{prefix}.q_proj")
        latent, shared = np.split(self.linear(x, f"{prefix}.kv_a_proj_with_mqa"), [rank], axis=1)
        kv = self.linear(self.norm(latent, f"{prefix}.kv_a_layernorm"), f"{prefix}.kv_b_proj").reshape(tokens, n, -1)
        k = np.concatenate([kv[..., :nope], np.repeat(shared[:, None], n, axis=1)], axis=2)
        scores = np.einsum("qhd,khd->hqk", q.reshape(tokens, n, nope + rope), k) / np.sqrt(nope + rope)
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", softmax(scores), kv[..., nope:]).reshape(tokens, -1)
        if c["mla_use_output_gate"]:
            out = out * sigmoid(self.linear(x, f"{prefix}.g_proj"))
        return self.linear(out, f"{prefix}.o_proj")

    def delta_attention(self, x, prefix):
        settings, tokens = self.config["linear_attn_config"], len(x)
        n, width, kernel = (settings[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size"))

        def convolved(part):
            padded = np.concatenate([np.zeros((kernel - 1, n * width)), self.linear(x, f"{prefix}.{part}_proj")])
            taps = self.weights[f"{prefix}.{part}_conv1d.weight"][:, 0]
            out = sum(padded[at : at + tokens] * taps[:, at] for at in range(kernel))
            return (out * sigmoid(out)).reshape(tokens, n, width)

        q, k, v = map(convolved, "qkv")
        q, k = (each / np.sqrt((each * each).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
        raw = self.linear(self.linear(x, f"{prefix}.f_a_proj"), f"{prefix}.f_b_proj") + self.weights[f"{prefix}.dt_bias"]
        rate, bound = np.exp(self.weights[f"{prefix}.A_log"])[:, None], settings["gate_lower_bound"]
        raw = raw.reshape(tokens, n, width)
        decay = np.exp(-rate * np.logaddexp(0, raw) if bound is None else bound * sigmoid(rate * raw))
        beta, state = sigmoid(self.linear(x, f"{prefix}.b_proj")), np.zeros((n, width, width))
        out = np.empty_like(v)
        for t in range(tokens):
            state = state * decay[t][..., None]
            change = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][..., None] * change[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(width)
        gate = sigmoid(self.linear(x, f"{prefix}.g_proj")).reshape(tokens, n, width)
        return self.linear((self.norm(out, f"{prefix}.o_norm") * gate).reshape(tokens, -1), f"{prefix}.o_proj")


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
