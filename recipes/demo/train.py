"""Trains the demo checkpoint: a small DeepSeek-V3 on the text that every Python carries.

Needs the `oracle` extra (torch, transformers). From the project's root:

    python recipes/demo/train.py --steps 2400

It writes beside itself what a published model folder holds (config.json, tokenizer.json, tokenizer_config.json,
two fp8 safetensors shards with their index), the texts `calibration.txt` (training side) and `heldout.txt`, and
`training.json`: how long it took and the perplexity reached on the held-out text, before and after fp8.
"""

import argparse
import ast
import json
import math
import random
import sysconfig
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FOLDER = Path(__file__).parent
CONTEXT = 512
BATCH = 8
HELD_OUT = 12  # every 12th text of the shuffled list is never trained on
FP8_MAX = 448.0
BLOCK = 128  # fp8 scales are per 128 x 128 block, as in DeepSeek-V3

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = [BOS, EOS, "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# The three splits of DeepSeek-V3's own tokenizer.json: numbers, CJK runs, then words and punctuation.
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def python_texts() -> list[str]:
    """The help topics and every docstring of the standard library (tests and site-packages left out), in a fixed order."""
    from pydoc_data.topics import topics

    texts = [topics[name].strip() for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library).as_posix()
        if relative.startswith(("site-packages/", "test/", "config-")) or "/test" in relative or "pydoc_data" in relative:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # a few files hold deliberately broken source
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 80:
                    texts.append(docstring)
    return list(dict.fromkeys(texts))


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """(training, held out). Long topics are cut into pieces of about 4,000 characters first, so that both sides hold some."""
    pieces: list[str] = []
    for text in texts:
        piece = ""
        for paragraph in text.split("\n\n"):
            piece = f"{piece}\n\n{paragraph}" if piece else paragraph
            if len(piece) > 4000:
                pieces.append(piece)
                piece = ""
        if piece:
            pieces.append(piece)
    random.Random(1).shuffle(pieces)
    return [p for i, p in enumerate(pieces) if i % HELD_OUT], pieces[::HELD_OUT]


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def model_config(vocab_size: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=256,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        num_nextn_predict_layers=0,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Every text begins with the BOS that the tokenizer adds."""
    return torch.tensor([i for e in tokenizer.encode_batch(texts) for i in e.ids], dtype=torch.long)


@torch.no_grad()
def perplexity(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, bos: int) -> float:
    """Windows of CONTEXT tokens, each begun with BOS, second half scored: what `ggufmill perplexity` measures."""
    model.eval()
    total, count, half = 0.0, 0, CONTEXT // 2
    for start in range(0, len(tokens) - CONTEXT + 1, CONTEXT):
        window = tokens[start : start + CONTEXT].clone()
        window[0] = bos
        logits = model(window[None]).logits[0, half:-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[half + 1 :], reduction="sum").item()
        count += len(window) - half - 1
    model.train()
    return math.exp(total / count)


def balance_experts(model: DeepseekV3ForCausalLM, step_size: float) -> None:
    """DeepSeek-V3's balancing without an auxiliary loss: after each step a router's bias moves towards the mean load."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            load = gate.load.float()
            gate.e_score_correction_bias += step_size * torch.sign(load.mean() - load)


def train(
    model: DeepseekV3ForCausalLM, tokens: torch.Tensor, held_out: torch.Tensor, steps: int, rate: float, minutes: float
) -> int:
    """AdamW, cosine schedule, bf16 autocast; stops early when `minutes` have passed. Returns the steps done."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            gate.register_forward_hook(
                lambda m, _, out: setattr(m, "load", torch.bincount(out[2].flatten(), minlength=m.num_experts))
            )
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n]
    plain = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    optimiser = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.15}, {"params": plain, "weight_decay": 0.0}], lr=rate, betas=(0.9, 0.95)
    )
    warmup, began = 100, time.time()
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        progress = max(step / steps, (time.time() - began) / (minutes * 60))
        if progress >= 1:
            return step
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        window = torch.stack([tokens[s : s + CONTEXT + 1] for s in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            balance_experts(model, 0.001)
        if step % 50 == 49:
            report = f"step {step + 1} loss {loss.item():.3f} {(time.time() - began) / (step + 1):.2f} s/step"
            if step % 200 == 199:
                with torch.autocast("cpu", torch.bfloat16):
                    report += f" held-out perplexity {perplexity(model, held_out, 0):.2f}"
            print(report, flush=True)
    return steps


def published_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers keeps the experts stacked; published checkpoints hold a matrix per expert and projection."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{stem}.{e}.gate_proj.weight"], out[f"{stem}.{e}.up_proj.weight"] = gate, up
        elif last == "down_proj" and tensor.dim() == 3:
            for e, down in enumerate(tensor):
                out[f"{stem}.{e}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return out


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> e4m3 codes and the float32 factor of each 128 x 128 block (edge blocks may be smaller)."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def from_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * full[: codes.shape[0], : codes.shape[1]]


def save_checkpoint(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """fp8 for what DeepSeek keeps in fp8 (the projections), bf16 for embeddings, norms and routers; two shards and an index.

    The model's own weights become what was saved, so that its perplexity afterwards is the checkpoint's."""
    tensors: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for name, tensor in published_names(state).items():
        tensor = tensor.detach().float()
        if name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            codes, scale = to_fp8(tensor)
            tensors[name], tensors[name + "_scale_inv"] = codes, scale
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.clone()
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    rounded = {
        name: from_fp8(t, tensors[name + "_scale_inv"]) if t.dtype == torch.float8_e4m3fn else t.float()
        for name, t in tensors.items()
        if not name.endswith("_scale_inv")
    }
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e in range(len(tensor)):
                tensor[e] = torch.cat([rounded[f"{stem}.{e}.gate_proj.weight"], rounded[f"{stem}.{e}.up_proj.weight"]])
        elif last == "down_proj" and tensor.dim() == 3:
            for e in range(len(tensor)):
                tensor[e] = rounded[f"{stem}.{e}.down_proj.weight"]
        else:
            tensor.copy_(rounded[name])

    total, first, size = sum(t.nbytes for t in tensors.values()), {}, 0
    for name, tensor in tensors.items():  # in model order, cut at half the bytes
        shard = 1 if size < total / 2 else 2
        first[name], size = shard, size + tensor.nbytes
    for shard in (1, 2):
        part = {n: t.contiguous() for n, t in tensors.items() if first[n] == shard}
        save_file(part, folder / f"model-0000{shard}-of-00002.safetensors", metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": total},
        "weight_map": {n: f"model-0000{s}-of-00002.safetensors" for n, s in first.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def save_config(config: DeepseekV3Config, folder: Path) -> None:
    """config.json in the spelling that DeepSeek publishes (rope_theta beside rope_scaling, torch_dtype)."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    keep = (
        "attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act hidden_size"
        " initializer_range intermediate_size kv_lora_rank max_position_embeddings moe_intermediate_size n_group"
        " n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers"
        " num_key_value_heads num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps"
        " routed_scaling_factor tie_word_embeddings topk_group v_head_dim vocab_size"
    )
    written = {key: getattr(config, key) for key in keep.split()}
    written |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_theta": theta,
        "rope_scaling": rope,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    (folder / "config.json").write_text(json.dumps(dict(sorted(written.items())), indent=2) + "\n")
    tokenizer_config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long, whatever the steps")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=1536)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)

    training, held_out = split_texts(python_texts())
    tokenizer = train_tokenizer(training, args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))
    text = "\n\n".join(held_out)[:160_000]
    tokens = token_stream(tokenizer, training)
    held = torch.tensor(tokenizer.encode(text).ids)
    config = model_config(tokenizer.get_vocab_size())
    model = DeepseekV3ForCausalLM(config).float()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(tokens):,} training tokens, {len(held):,} held-out tokens", flush=True)

    began = time.time()
    steps = train(model, tokens, held, args.steps, args.rate, args.minutes)
    seconds = time.time() - began
    before = perplexity(model, held, 0)
    with torch.no_grad():
        save_checkpoint(model, args.out)
    after = perplexity(model, held, 0)
    save_config(config, args.out)
    (args.out / "heldout.txt").write_text(text + "\n", "utf-8")
    (args.out / "calibration.txt").write_text("\n\n".join(training)[:160_000] + "\n", "utf-8")
    card = {
        "parameters": parameters,
        "training_tokens": len(tokens),
        "steps": steps,
        "tokens_seen": steps * BATCH * CONTEXT,
        "minutes": round(seconds / 60, 1),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "held_out_perplexity": {"float32": round(before, 3), "fp8": round(after, 3), "context": CONTEXT},
    }
    (args.out / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
