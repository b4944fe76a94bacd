"""openPangu 2 in numpy, from its definition: config, weights by the names of the checkpoint, logits."""

import json

import numpy as np
from kimi_k3_model import sigmoid, softmax
from recorded_models import draw
from safetensors.numpy import save_file

LENGTH = 60
CONFIG = {
    "architectures": ["OpenPanguV2ForCausalLM"],
    "model_type": "openpangu_v2",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_interleave": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "param_sink_number": 5,
    "router_sliding_window": 3,
    "use_mome": True,
    "use_mhc": True,
    "mhc_use_gamma": True,
    "mhc_num_stream": 4,
    "mhc_recur_norm": 20,
    "sandwich_norm": True,
    "block_post_layernorm_idx": [1],
    "swa_layers": [0, 2, 4],
    "sliding_window_list": [15, 15, 40],
    "dsa_layers": [1, 3],
    "index_n_heads": 16,  # with fewer many scores are 0, and which of equal ones is chosen is open
    "index_head_dim": 16,
    "index_topk": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ODD = CONFIG | {"mhc_num_stream": 3, "mhc_recur_norm": 4, "block_post_layernorm_idx": [], "param_sink_number": 1}
ODD |= {
    "swa_layers": [2],
    "sliding_window_list": [9],
    "dsa_layers": [0, 1, 3],
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 3,
}
CONFIGS = {"openpangu": CONFIG, "openpangu-odd": ODD}
MLP = ("gate_proj", "up_proj", "down_proj")


def write_checkpoint(config, folder):
    """A random model under the names of the published checkpoint, with a draft layer's first tensor. Returns its weights."""
    weights = {name: draw(name, shape, mean) for name, (shape, mean) in _shapes(config).items()}
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("[UNK]\n")
    (folder / "config.json").write_text(json.dumps(config))
    draft = {f"model.layers.{config['num_hidden_layers']}.enorm.weight": np.ones(config["hidden_size"], np.float32)}
    save_file(weights | draft, folder / "model.safetensors")
    return weights


def _shapes(c):
    """Name -> (shape, mean of a vector's numbers)."""
    hidden, n, vocab, streams = (c[key] for key in ("hidden_size", "num_attention_heads", "vocab_size", "mhc_num_stream"))
    nope, rope, v_width, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    q_rank, wide, sinks = c["q_lora_rank"], streams * hidden, c["param_sink_number"]
    shapes = {"model.embed_tokens.weight": ((vocab, hidden), 0), "lm_head.weight": ((vocab, hidden), 0)}
    shapes |= {"model.norm.weight": ((hidden,), 1), "model.merge_mhc_module.phi.weight": ((streams, wide), 0)}
    shapes |= {"model.merge_mhc_module.branch_alpha_pre": ((1,), 1), "model.merge_mhc_module.branch_beta_pre": ((streams,), 0)}
    shapes["model.merge_mhc_module.norm_gamma"] = ((wide,), 1)
    for i in range(c["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        norms = {f"{layer}.{name}_layernorm": hidden for name in ("input", "post_attention", "pre_mlp", "post_mlp")}
        norms |= {f"{attention}.q_a_layernorm": q_rank, f"{attention}.kv_a_layernorm": rank}
        norms |= {f"{layer}.block_post_layernorm": wide} if i in c["block_post_layernorm_idx"] else {}
        matrices = {"q_a_proj": (q_rank, hidden), "q_b_proj": (n * (nope + rope), q_rank), "o_proj": (hidden, n * v_width)}
        matrices |= {"kv_a_proj_with_mqa": (rank + rope, hidden), "kv_b_proj": (n * (nope + v_width), rank)}
        matrices |= {"qa_conv": (q_rank, 1, 3), "compresskv_conv": (rank, 1, 3), "o_conv": (n * v_width, 1, 3)}
        if i not in c["swa_layers"]:
            heads, width = c["index_n_heads"], c["index_head_dim"]
            matrices |= {"indexer.wq_b": (heads * width, q_rank), "indexer.wk": (width, hidden)}
            matrices["indexer.weights_proj"] = (heads, hidden)
            norms[f"{attention}.indexer.k_norm"] = width
        shapes |= {f"{attention}.{name}.weight": (shape, 0) for name, shape in matrices.items()}
        shapes |= {
            f"{attention}.param_sink_compressed_kv": ((sinks, rank), 0),
            f"{attention}.param_sink_k_pe": ((sinks, rope), 0),
        }
        for part in ("attn", "mlp"):
            size, module = (streams + 2) * streams, f"{layer}.{part}_mhc_module"
            shapes |= {f"{module}.phi.weight": ((size, wide), 0), f"{module}.norm_gamma": ((wide,), 1)}
            shapes |= {f"{module}.branch_alpha": ((3,), 1), f"{module}.branch_beta": ((size,), 0)}
        shapes |= {f"{name}.weight": ((size,), 1) for name, size in norms.items()}
        blocks = {f"{layer}.mlp": c["intermediate_size"]}
        if i >= c["first_k_dense_replace"]:
            rows = c["moe_intermediate_size"]
            blocks = {f"{layer}.mlp.experts.{e}": rows for e in range(c["n_routed_experts"])}
            blocks[f"{layer}.mlp.shared_experts"] = c["n_shared_experts"] * rows
            shapes |= {f"{layer}.mlp.gate.weight": ((c["n_routed_experts"], hidden), 0)}
            shapes |= {f"{layer}.mlp.e_score_correction_bias": ((c["n_routed_experts"],), 0)}
        for block, rows in blocks.items():
            sides = ((rows, hidden), (rows, hidden), (hidden, rows))
            shapes |= {f"{block}.{name}.weight": (shape, 0) for name, shape in zip(MLP, sides, strict=True)}
    return shapes


class OpenPangu:
    """logits(tokens): float64 [tokens, vocabulary], all tokens at once."""

    def __init__(self, config, weights):
        self.config, self.weights = config, {name: np.asarray(x, np.float64) for name, x in weights.items()}

    def logits(self, tokens):
        c = self.config
        x = np.repeat(self.weights["model.embed_tokens.weight"][tokens][:, None], c["mhc_num_stream"], axis=1)
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = self.around(x, f"{layer}.attn_mhc_module", lambda h, i=i, layer=layer: self.attention_block(h, i, layer))
            x = self.around(x, f"{layer}.mlp_mhc_module", lambda h, i=i, layer=layer: self.feed_forward_block(h, i, layer))
            if i in c["block_post_layernorm_idx"]:
                x = self.norm(x.reshape(len(x), -1), f"{layer}.block_post_layernorm.weight").reshape(x.shape)
        merge, flat = "model.merge_mhc_module", x.reshape(len(x), -1)
        numbers = self.linear(self.norm(flat, f"{merge}.norm_gamma"), f"{merge}.phi")
        factors = sigmoid(numbers * self.weights[f"{merge}.branch_alpha_pre"] + self.weights[f"{merge}.branch_beta_pre"]) + 1e-6
        return self.linear(self.norm((factors[..., None] * x).sum(1), "model.norm.weight"), "lm_head")

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def around(self, x, module, block):
        n, flat = self.config["mhc_num_stream"], x.reshape(len(x), -1)
        numbers = self.linear(self.norm(flat, f"{module}.norm_gamma"), f"{module}.phi")
        alpha, beta = self.weights[f"{module}.branch_alpha"], self.weights[f"{module}.branch_beta"]
        before = sigmoid(numbers[:, :n] * alpha[0] + beta[:n]) + 1e-6
        behind = 2 * sigmoid(numbers[:, n : 2 * n] * alpha[1] + beta[n : 2 * n])
        matrix = softmax((numbers[:, 2 * n :] * alpha[2] + beta[2 * n :]).reshape(-1, n, n)) + 1e-6
        matrix = matrix / (matrix.sum(1, keepdims=True) + 1e-6)
        for _ in range(self.config["mhc_recur_norm"] - 1):
            matrix = matrix / (matrix.sum(2, keepdims=True) + 1e-6)
            matrix = matrix / (matrix.sum(1, keepdims=True) + 1e-6)
        update = block((before[..., None] * x).sum(1))
        return behind[..., None] * update[:, None] + np.einsum("tij,tiw->tjw", matrix, x)

    def attention_block(self, h, i, layer):
        h = self.attention(self.norm(h, f"{layer}.input_layernorm.weight"), i, f"{layer}.self_attn")
        return self.norm(h, f"{layer}.post_attention_layernorm.weight")

    def feed_forward_block(self, h, i, layer):
        h = self.norm(h, f"{layer}.pre_mlp_layernorm.weight")
        h = self.gated(h, f"{layer}.mlp") if i < self.config["first_k_dense_replace"] else self.experts(h, f"{layer}.mlp")
        return self.norm(h, f"{layer}.post_mlp_layernorm.weight")

    def convolved(self, x, name):
        padded = np.concatenate([np.zeros((2, x.shape[1])), x])
        taps = self.weights[f"{name}.weight"][:, 0]
        return x + sum(padded[at : at + len(x)] * taps[:, at] for at in range(3))

    def rotated(self, x):
        """The elements of the last axis, the first half with the second, by the positions of the first axis."""
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = (f(angles).reshape(len(x), *[1] * (x.ndim - 2), half) for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, x, i, prefix):
        c, tokens, n = self.config, len(x), self.config["num_attention_heads"]
        nope, rope, v_width, rank = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        q_latent = self.convolved(self.linear(x, f"{prefix}.q_a_proj"), f"{prefix}.qa_conv")
        q_latent = self.norm(q_latent, f"{prefix}.q_a_layernorm.weight")
        q = self.linear(q_latent, f"{prefix}.q_b_proj").reshape(tokens, n, nope + rope)
        q = np.concatenate([q[..., :nope], self.rotated(q[..., nope:])], axis=-1)
        latent, k_pe = np.split(self.linear(x, f"{prefix}.kv_a_proj_with_mqa"), [rank], axis=1)
        latent = np.concatenate(
            [self.weights[f"{prefix}.param_sink_compressed_kv"], self.convolved(latent, f"{prefix}.compresskv_conv")]
        )
        kv = self.linear(self.norm(latent, f"{prefix}.kv_a_layernorm.weight"), f"{prefix}.kv_b_proj")
        kv = kv.reshape(len(latent), n, nope + v_width)
        k_pe = np.concatenate([self.weights[f"{prefix}.param_sink_k_pe"], self.rotated(k_pe)])
        k = np.concatenate([kv[..., :nope], np.repeat(k_pe[:, None], n, axis=1)], axis=2)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(nope + rope)
        seen = np.concatenate([np.ones((tokens, len(latent) - tokens), bool), self.seen(x, q_latent, i, prefix)], axis=1)
        weights = softmax(np.where(seen, scores, -np.inf))
        out = np.einsum("hqk,khd->qhd", weights, kv[..., nope:]).reshape(tokens, -1)
        return self.linear(self.convolved(out, f"{prefix}.o_conv"), f"{prefix}.o_proj")

    def seen(self, x, q_latent, i, prefix):
        c, tokens = self.config, len(x)
        distance = np.arange(tokens)[:, None] - np.arange(tokens)
        if i in c["swa_layers"]:
            return (distance >= 0) & (distance < c["sliding_window_list"][c["swa_layers"].index(i)])
        heads, width, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        q = self.linear(q_latent, f"{prefix}.indexer.wq_b").reshape(tokens, heads, width)
        k = self.norm(self.linear(x, f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm.weight")
        q, k = (np.concatenate([self.rotated(part[..., :rope]), part[..., rope:]], axis=-1) for part in (q, k))
        scores = np.einsum("qhd,kd->qhk", q, k).clip(min=0)
        scores = np.einsum("qhk,qh->qk", scores, self.linear(x, f"{prefix}.indexer.weights_proj"))
        scores = np.where(distance >= 0, scores, -np.inf)
        chosen = np.argsort(-scores, axis=1)[:, : c["index_topk"]]
        seen = np.zeros((tokens, tokens), bool)
        np.put_along_axis(seen, chosen, True, axis=1)
        return seen & (distance >= 0)

    def gated(self, x, prefix):
        gate, up, down = (f"{prefix}.{name}" for name in MLP)
        gate = self.linear(x, gate)
        return self.linear(gate * sigmoid(gate) * self.linear(x, up), down)

    def experts(self, x, prefix):
        c, scores = self.config, sigmoid(self.linear(x, f"{prefix}.gate"))
        order = np.argsort(-(scores + self.weights[f"{prefix}.e_score_correction_bias"]), axis=1)
        chosen = order[:, : c["num_experts_per_tok"]]
        factors = np.take_along_axis(scores, chosen, axis=1)
        factors = factors / factors.sum(1, keepdims=True) if c["norm_topk_prob"] else factors
        out = self.gated(x, f"{prefix}.shared_experts")
        for token in range(len(x)):
            for expert, factor in zip(chosen[token], factors[token] * c["routed_scaling_factor"], strict=True):
                out[token] += factor * self.gated(x[token], f"{prefix}.experts.{expert}")
        return out
