"""Against transformers: the inputs of every weight of a tiny checkpoint of each architecture, recorded there by hooks.

Every product with a weight is intercepted in torch, experts in stacks too, each by its address in the stack's memory. Inputs of
tensors that only a GGUF has (attn_k_b, attn_v_b) are computed from queries, latents and attention probabilities.
"""

import math
import re

import checkpoint_cases as checkpoints
import numpy as np
import pytest
from recorded_models import kept_cases

from ggufmill.convert import open_source
from ggufmill.imatrix.collect import CollectOptions, collect
from ggufmill.imatrix.covariance.collector import CovarianceCollector
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.quantize.recipes.type_selection import is_quantizable
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import make_windows
from ggufmill.runtime.graph import ops

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-3
N_CTX, WINDOWS = checkpoints.LENGTH, 2
COVARIANCE_CASES = ("llama", "mixtral", "v3", "v3-mainline", "phi3")  # dense, experts, latent attention in two layouts, fused

# suffix of a parameter's name in transformers -> tensors in GGUF; a stack of gate and up becomes two
NAMES = {
    "compressor.indexer.q_b_proj": ["indexer.attn_q_b"],
    "compressor.indexer.kv_proj": ["indexer_compressor_kv"],
    "compressor.indexer.gate_proj": ["indexer_compressor_gate"],
    "scorer.weights_proj": ["indexer.proj"],
    "compressor.kv_proj": ["attn_compressor_kv"],
    "compressor.gate_proj": ["attn_compressor_gate"],
    "self_attn.kv_proj": ["attn_kv"],
    "o_a_proj": ["attn_output_a"],
    "o_b_proj": ["attn_output_b"],
    "attn_hc.fn": ["hc_attn_fn"],
    "ffn_hc.fn": ["hc_ffn_fn"],
    "hc_head.hc_fn": ["output_hc_fn"],
    "indexer.index_qk_proj": ["indexer.q_proj", "indexer.k_proj"],
    "attn_hyper_connection.input_mix_weight_down": ["hc_attn_down"],
    "attn_hyper_connection.input_mix_weight_up": ["hc_attn_up"],
    "attn_hyper_connection.block_inject_weight": ["hc_attn_inject"],
    "mlp_hyper_connection.input_mix_weight_down": ["hc_ffn_down"],
    "mlp_hyper_connection.input_mix_weight_up": ["hc_ffn_up"],
    "mlp_hyper_connection.block_inject_weight": ["hc_ffn_inject"],
    "hyper_connection_mixer.input_mix_weight_down": ["output_hc_down"],
    "hyper_connection_mixer.input_mix_weight_up": ["output_hc_up"],
    "ple.key_proj": ["ple_key"],
    "ple.value_proj": ["ple_value"],
    "indexer.q_proj": ["indexer.q_proj"],
    "indexer.k_proj": ["indexer.k_proj"],
    "qkv_proj": ["attn_qkv"],
    "q_proj": ["attn_q"],
    "k_proj": ["attn_k"],
    "v_proj": ["attn_v"],
    "o_proj": ["attn_output"],
    "q_a_proj": ["attn_q_a"],
    "q_b_proj": ["attn_q_b"],
    "kv_a_proj_with_mqa": ["attn_kv_a_mqa"],
    "kv_b_proj": ["attn_kv_b"],
    "experts.mlp.w1": ["ffn_gate_exps"],
    "experts.mlp.v1": ["ffn_up_exps"],
    "experts.mlp.w2": ["ffn_down_exps"],
    **{f"mlps.{half}.{part}_proj": [f"ffn_{part}"] for half in range(2) for part in ("gate", "up", "down")},
    "mlp.gate_proj": ["ffn_gate"],
    "mlp.up_proj": ["ffn_up"],
    "mlp.down_proj": ["ffn_down"],
    "experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"],  # those that the file has
    "experts.down_proj": ["ffn_down_exps"],
    "mlp.gate_up_proj": ["ffn_gate", "ffn_up"],  # those that the file has
    "feed_forward.gate_proj": ["ffn_gate"],
    "feed_forward.up_proj": ["ffn_up"],
    "feed_forward.down_proj": ["ffn_down"],
    "self_attn.gate_proj": ["attn_gate"],
    "self_attn.g_proj": ["attn_gate", "ssm_g_a"],  # the one that the file has
    "mlp.c_fc": ["ffn_up"],
    "mlp.c_proj": ["ffn_down"],
    "indexer.wq_b": ["indexer.attn_q_b"],
    "indexer.wk": ["indexer.attn_k"],
    "indexer.weights_proj": ["indexer.proj"],
    "linear_attn.in_proj_qkvz": ["attn_qkv", "attn_gate"],
    "linear_attn.in_proj_ba": ["ssm_ba"],
    "linear_attn.in_proj_qkv": ["attn_qkv"],
    "linear_attn.in_proj_z": ["attn_gate"],
    "linear_attn.in_proj_b": ["ssm_beta"],
    "linear_attn.in_proj_a": ["ssm_alpha"],
    "linear_attn.out_proj": ["ssm_out"],
    "per_layer_input_gate": ["inp_gate"],
    "per_layer_projection": ["proj"],
    "per_layer_model_projection": ["per_layer_model_proj"],
    "altup.correction_coefs": ["altup_correct_coef"],
    "altup.prediction_coefs": ["altup_predict_coef"],
    "altup.modality_router": ["altup_router"],
    "laurel.linear_left": ["laurel_l"],
    "laurel.linear_right": ["laurel_r"],
    "lm_head": ["output"],
    "conv.in_proj": ["shortconv.in_proj"],
    "conv.out_proj": ["shortconv.out_proj"],
    "attn.out_proj": ["attn_output"],
    "c_attn": ["attn_qkv"],
    "attn.c_proj": ["attn_output"],
    "query_key_value": ["attn_qkv"],
    "Wqkv": ["attn_qkv"],
    "attention.dense": ["attn_output"],
    "self_attn.dense": ["attn_output"],
    "dense_h_to_4h": ["ffn_up"],
    "dense_4h_to_h": ["ffn_down"],
    "ffn.up_proj": ["ffn_up"],
    "ffn.down_proj": ["ffn_down"],
    "mlp.fc1": ["ffn_up"],
    "mlp.fc2": ["ffn_down"],
    "feed_forward.w1": ["ffn_gate"],
    "feed_forward.w2": ["ffn_down"],
    "feed_forward.w3": ["ffn_up"],
    ".in_proj": ["ssm_in"],
    "x_proj": ["ssm_x"],
    "dt_proj": ["ssm_dt"],
    ".out_proj": ["ssm_out"],
    "mixer.experts.up_proj": ["ffn_up_exps"],
    "mixer.up_proj": ["ffn_up"],
    "mixer.down_proj": ["ffn_down"],
    "fc1_latent_proj": ["ffn_latent_down"],
    "fc2_latent_proj": ["ffn_latent_up"],
    "f_proj": ["ssm_f_a"],
    "forget_gate.f_a_proj": ["ssm_f_a"],
    "forget_gate.f_b_proj": ["ssm_f_b"],
    "g_a_proj": ["ssm_g_a"],
    "g_b_proj": ["ssm_g_b"],
    "self_attn.b_proj": ["ssm_beta"],
}
ROUTERS = (
    "router.gate",
    "feed_forward.router",
    "feed_forward.gate",
    "mixer.gate",
    "mlp.gate",
    "mlp.router",
    "block_sparse_moe.gate",
    "mlp.gate.wg",
    "mlp.gate.gate",
    "block_sparse_moe.router",
    "router.proj",
    "router.layer",
    "router.classifier",
)
SHARED = {
    "gate_up_proj": ["ffn_gate_shexp", "ffn_up_shexp"],
    "gate_proj": ["ffn_gate_shexp"],
    "up_proj": ["ffn_up_shexp"],
    "down_proj": ["ffn_down_shexp"],
}
SHARED |= {"input_linear": ["ffn_gate_shexp", "ffn_up_shexp"], "output_linear": ["ffn_down_shexp"]}


LAYER = r"\b(?:layers|h|blocks)\.(\d+)\."


def block_number(name, blocks=1):
    """Of the GGUF, of a parameter or module. blocks: in a layer; LongCat-Flash has two, the experts in the first."""
    layer = int(re.search(LAYER, name)[1])
    half = re.search(r"\.(?:self_attn|mlps)\.([01])\b", name)
    return blocks * layer + int(half[1] if half else 0)


def gguf_names(name, has_experts=True, blocks=1):
    """The GGUF tensors that a parameter of transformers becomes; [] for parameters that are not collected.

    has_experts: of the model; a shared expert without others is a dense block (Granite 4). blocks: see `block_number`."""
    name = name.removesuffix(".weight")
    prefix = f"blk.{block_number(name, blocks)}." if re.search(LAYER, name) else ""
    if "shared_expert" in name or "shared_mlp" in name:
        tensors = next((SHARED[end] for end in SHARED if name.endswith(end)), [])  # not the gate of a shared expert, a vector
        if not has_experts:
            tensors = [tensor.removesuffix("_shexp") for tensor in tensors]
    elif name.endswith(ROUTERS):
        tensors = ["ffn_gate_inp"]
    else:
        tensors = next((names for end, names in NAMES.items() if name.endswith(end)), [])
    return [f"{prefix}{each}.weight" for each in tensors]


class InputRecorder:
    """Records x of every x @ W.T by parameter and expert."""

    def __init__(self, torch, model):
        self.torch, self.inputs, self._keys = torch, {}, {}
        for name, parameter in model.named_parameters():
            if not parameter.numel():  # of shared experts that a model does not have
                continue
            if parameter.dim() == 3:
                step = parameter.stride(0) * parameter.element_size()
                for expert in range(parameter.shape[0]):
                    self._keys[parameter.data_ptr() + expert * step] = (name, expert)
            elif name.endswith("o_a_proj.weight"):  # a matrix for each group of heads
                for group in range(model.config.o_groups):
                    self._keys[parameter.data_ptr() + group * parameter.nbytes // model.config.o_groups] = (name, 0)
            elif parameter.dim() == 2 and "embed" not in name and parameter is not model.get_input_embeddings().weight:
                n = model.config.ffn_config.moe_num_experts if "experts.mlp." in name else 1  # of DBRX, all in one matrix
                for expert in range(n):
                    at = expert * (parameter.shape[0] // n) * parameter.stride(0) * parameter.element_size()
                    self._keys[parameter.data_ptr() + at] = (name, expert)
        if model.lm_head.weight.data_ptr() not in self._keys:
            self._keys[model.lm_head.weight.data_ptr()] = ("lm_head.weight", 0)

    def record(self, x, weight):
        if x.dim() == weight.dim() == 3:  # of all experts, whatever they have no weight for being 0
            for expert, rows in enumerate(x):
                self.record(rows[rows.any(dim=1)], weight[expert])
            return
        key = self._keys.get(weight.data_ptr())
        if key is not None:
            self.inputs.setdefault(key, []).append(x.detach().reshape(-1, x.shape[-1]).double().numpy())

    def mode(self):
        torch, recorder = self.torch, self
        products = {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm}

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function is torch.addmm:  # GPT-2's x @ W + b
                    recorder.record(args[1], args[2])
                if function in products:
                    recorder.record(args[0], args[1])
                    if args[0].dim() == 2 and args[1].dim() == 3:  # Jamba's W @ x.T
                        recorder.record(args[1].transpose(1, 2), args[0])
                return function(*args, **(kwargs or {}))

        return Mode()


def reference(case, folder):
    """((GGUF name, matrix) -> inputs float64 [n, columns] for the windows that `collect` reads, source, token ids)."""
    torch, _ = checkpoints.oracle()
    checkpoints.record_of(case).write(folder)
    model = checkpoints.saved_model(case, folder)
    config = getattr(model.config, "text_config", model.config)
    for each in (config, model.config):
        each._experts_implementation = "eager"
    source = open_source(folder, mla_layout=checkpoints.layout_of(case))
    tokens = np.random.default_rng(5).integers(3, checkpoints.COMMON["vocab_size"], N_CTX * WINDOWS)
    windows = make_windows(load_model(source), tokens, N_CTX, None)
    recorder, queries, probabilities, latent_names = InputRecorder(torch, model), {}, {}, {}
    blocks = 2 if config.model_type == "longcat_flash" else 1
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "kv_b_proj"):
            layer = block_number(f"{name}.", blocks)
            latent_names[layer] = f"{name}.kv_b_proj.weight"
            q = module.q_b_proj if getattr(module, "q_lora_rank", None) else module.q_proj
            hooks += [
                q.register_forward_hook(
                    lambda _, __, out, at=layer: queries.setdefault(at, []).append(out[0].double().numpy())
                ),
                module.register_forward_hook(
                    lambda _, __, out, at=layer: probabilities.setdefault(at, []).append(out[1][0].double().numpy())
                ),
            ]
    with torch.no_grad(), recorder.mode():
        for window in windows:
            model(torch.tensor(window[None]), output_attentions=True)
    inputs = {}
    for (name, matrix), pieces in recorder.inputs.items():
        if name == "lm_head.weight":  # only scored positions go through the head
            pieces = [piece[N_CTX // 2 : N_CTX - 1] for piece in pieces]
        for tensor in gguf_names(name, getattr(config, "num_local_experts", 1) != 0, blocks):
            is_optional = ".indexer." in tensor or tensor.endswith(("_exps.weight", "_gate.weight", ".ssm_g_a.weight"))
            if is_optional and tensor not in source.tensors:
                continue
            inputs[tensor, matrix] = as_in_gguf(config, tensor, np.concatenate(pieces))
    for layer, pieces in queries.items():
        latents = recorder.inputs[latent_names[layer], 0]
        nope, heads = config.qk_nope_head_dim, config.num_attention_heads
        k = np.concatenate([q.reshape(N_CTX, heads, -1)[..., :nope] * temperature(config)[:, None, None] for q in pieces])
        pairs = zip(probabilities[layer], latents, strict=True)
        v = np.concatenate([np.einsum("hnm,mr->nhr", p, c) for p, c in pairs])
        for part, x in (("k_b", k), ("v_b", v)):
            for head in range(heads):
                inputs[f"blk.{layer}.attn_{part}.weight", head] = x[:, head]
    return inputs, source, tokens


def as_in_gguf(config, tensor, x):
    """What differs between the inputs of a parameter and those of its tensor: the order of value heads in Qwen 3.5 (see
    convert/architectures/qwen3next.py), MiMo's factor of the values, which here multiplies the product, and Falcon-H1's,
    which are in the matrices."""
    if config.model_type == "longcat_flash" and tensor.endswith(".attn_q_b.weight"):
        return x * (config.hidden_size / config.q_lora_rank) ** 0.5  # in the norm
    if config.model_type == "falcon_h1":
        factors = {"attn_q": config.attention_in_multiplier, "attn_k": config.attention_in_multiplier}
        factors |= {"attn_v": config.attention_in_multiplier, "ssm_in": config.ssm_in_multiplier}
        return x / factors.get(tensor.split(".")[-2], 1.0)
    if tensor.endswith(".ssm_out.weight") and config.model_type.startswith(("qwen3_5", "qwen4_exp")):
        keys, width = config.linear_num_key_heads, config.linear_value_head_dim
        return x.reshape(len(x), keys, -1, width).swapaxes(1, 2).reshape(x.shape)
    if tensor.endswith(".attn_output.weight") and getattr(config, "attention_value_scale", None):
        return x / config.attention_value_scale
    return x


def temperature(config):
    """Factors of the queries at each position; those of a model without are 1."""
    rope, positions = getattr(config, "rope_parameters", None) or {}, np.arange(N_CTX)
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if config.model_type == "longcat_flash":
        return np.full(N_CTX, (config.hidden_size / config.q_lora_rank) ** 0.5)  # of the latent
    return 1 + beta * np.log1p(positions // length) if beta else np.ones(N_CTX)


def entries_of(inputs):
    """Tensor name -> sums [matrices, columns], counts [matrices]."""
    matrices = {}
    for (name, matrix), x in inputs.items():
        matrices.setdefault(name, {})[matrix] = (x**2).sum(0), len(x)
    entries = {}
    for name, rows in matrices.items():
        width = len(next(iter(rows.values()))[0])
        last = max(rows)
        none = np.zeros(width), 0
        sums, counts = zip(*(rows.get(i, none) for i in range(last + 1)), strict=True)
        entries[name] = np.stack(sums), np.array(counts)
    return entries


def _logit_scale(model):
    """Factor of the logits."""
    return math.prod(op.factor for op in model.graph.head if isinstance(op, ops.Scale))


def covering_cases():
    """The first case of each architecture, and those that have every op and variant between them: inputs are observed by op,
    and what further variants compute is compared by tests/runtime/test_checkpoints.py."""
    first = {}
    for case, (family, *_) in checkpoints.CASES.items():
        first.setdefault(family, case)
    return [case for case in checkpoints.CASES if case in {*first.values(), *kept_cases()}]


@pytest.mark.parametrize("case", covering_cases())
def test_sums_are_those_of_transformers(tmp_path, case):
    inputs, source, tokens = reference(case, tmp_path)
    latent = any(".attn_kv_a_mqa." in name for name in source.tensors)
    mla = sum(map(ord, case)) % 4
    model = load_model(source, exact=True, **({"mla": mla} if latent else {}))
    imatrix, _ = collect(model, tokens, n_ctx=N_CTX, options=CollectOptions(output=True))
    tied = "output.weight" not in source.tensors
    expected = {"token_embd.weight" if tied and n == "output.weight" else n: e for n, e in entries_of(inputs).items()}
    wanted = {t.name for t in source.tensors.values() if is_quantizable(t)} - (
        {"token_embd.weight", "per_layer_token_embd.weight"} - set(expected)
    )
    assert wanted <= set(imatrix.entries)
    assert set(imatrix.entries) == set(expected)
    apart = {}
    for name, (sums, counts) in imatrix.entries.items():
        theirs, seen = expected[name]
        if len(counts) == 1 and len(seen) > 1:  # one matrix for all heads
            theirs, seen = theirs.sum(0, keepdims=True), seen.sum(keepdims=True)
        theirs = np.pad(theirs, ((0, len(counts) - len(seen)), (0, 0)))  # the last experts may have seen no token
        assert counts.tolist() == np.pad(seen, (0, len(counts) - len(seen))).tolist(), name
        for mine, other in zip(sums, theirs, strict=True):
            if name in ("output.weight", "token_embd.weight") and case.startswith("minicpm"):
                other = other / _logit_scale(model) ** 2  # transformers scales what goes into the head, not what comes out
            if other.any():
                apart[name] = max(apart.get(name, 0.0), float(np.linalg.norm(mine - other) / np.linalg.norm(other)))
    print(f"{case}: {len(imatrix.entries)} tensors, largest relative error {max(apart.values()):.1e}")
    # Where latents that an indexer selects are not expanded, attn_v_b's entry is of all of them, selected or not.
    sparse = 0.3 if mla < 2 and any(".indexer." in name for name in expected) else TOLERANCE
    limits = {name: sparse if name.endswith(".attn_v_b.weight") else TOLERANCE for name in apart}
    assert {name: error for name, error in apart.items() if error >= limits[name]} == {}


@pytest.mark.parametrize("case", COVARIANCE_CASES)
def test_covariances_are_those_of_transformers(tmp_path, case):
    """Up to what rounding to 8 bits changes. Experts' gate and up have the layer's, which every token has once."""
    inputs, source, tokens = reference(case, tmp_path)
    model = load_model(source, exact=True)
    collector = CovarianceCollector(covariance_inputs(model.graph, experts=True), model.workers)
    collect(model, tokens, n_ctx=N_CTX, covariance=collector)
    parts, compared = {}, 0
    collector.each_part(lambda name, matrix, covariance: parts.update({(name, matrix): covariance}))
    for one in collector.inputs:
        for name in one.tensors:
            if (name, 0) not in inputs or name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
                continue
            for matrix in range(one.matrices):
                x = inputs.get((name, matrix), np.zeros((0, one.columns)))
                if one.matrices == 1:  # one matrix for all heads
                    x = np.concatenate([x for (other, _), x in inputs.items() if other == name])
                covariance = parts[one.name, matrix]
                assert covariance.tokens == len(x), name
                expected = x.T @ x / max(1, len(x))
                assert np.linalg.norm(covariance.matrix - expected) <= 0.01 * np.linalg.norm(expected), name
                compared += 1
    assert compared >= len(collector.inputs)
