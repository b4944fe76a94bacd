"""Trains a dense Llama from scratch on text files, as a second model for benchmarks/imatrix/covariance.py.

\\b
    python benchmarks/imatrix/covariance_model.py wiki.txt articles.txt --out second --minutes 45
    ggufmill convert second second-bf16.gguf

Needs the `oracle` extra (torch, transformers). Hidden size 512, 20 M weights, 512 tokens of context; any UTF-8 text of a
megabyte or more will do. The last part of each file is never trained on. OUT becomes a model folder in bf16 (config.json,
tokenizer.json, tokenizer_config.json, model.safetensors) with the texts `calibration.txt` (of the training side) and
`heldout.txt`, and `training.json`: perplexity on the held-out text, beside that of the frequencies of the tokens alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512
BATCH = 2  # windows: small steps, since the time for training is short
CHARACTERS = 200_000  # of calibration.txt and heldout.txt
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SAVE_STEPS = 400


def split_text(path: Path, held_out: float) -> tuple[str, str]:
    """(training, held out), cut at the end of a line near the given share from the end."""
    text = path.read_text("utf-8")
    at = text.find("\n", int(len(text) * (1 - held_out))) + 1
    if at == 0:
        raise click.UsageError(f"{path} has no line to cut at in its last part: it is too short")
    return text[:at], text[at:]


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE with the pre-tokenizer of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def model_config(vocab_size: int, hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Windows of CONTEXT tokens, each begun with BOS, second half scored: what `ggufmill perplexity` measures."""
    total, count, half = 0.0, 0, CONTEXT // 2
    for start in range(0, len(tokens) - CONTEXT + 1, CONTEXT):
        window = tokens[start : start + CONTEXT].clone()
        window[0] = 0
        logits = model(window[None]).logits[0, half:-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[half + 1 :], reduction="sum").item()
        count += len(logits)
    return math.exp(total / count)


def unigram_perplexity(training: torch.Tensor, held_out: torch.Tensor, vocab_size: int) -> float:
    """Of a model that knows how frequent each token of the training text is, and nothing else."""
    counts = torch.bincount(training, minlength=vocab_size).double() + 1
    return math.exp(-(counts / counts.sum()).log()[held_out].mean().item())


def save(model: LlamaForCausalLM, config: LlamaConfig, folder: Path) -> None:
    """config.json in the spelling that published checkpoints have, and the weights in bf16."""
    save_file(
        {name: t.detach().to(torch.bfloat16).contiguous() for name, t in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    keep = (
        "bos_token_id eos_token_id hidden_act hidden_size initializer_range intermediate_size max_position_embeddings"
        " num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps tie_word_embeddings vocab_size"
    )
    written = {key: getattr(config, key) for key in keep.split()}
    written |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(dict(sorted(written.items())), indent=2) + "\n")


def train(
    model: LlamaForCausalLM, tokens: torch.Tensor, steps: int, minutes: float, rate: float, on_save: Callable[[], None]
) -> int:
    """AdamW with a cosine schedule, bf16 autocast; ends after `minutes`, whatever the steps. Returns the steps done."""
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n]
    plain = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    generator, began, mean = torch.Generator().manual_seed(2), time.time(), 0.0
    for step in range(steps):
        progress = max(step / steps, (time.time() - began) / (minutes * 60))
        if progress >= 1:
            return step
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        window = torch.stack([tokens[s : s + CONTEXT + 1] for s in starts.tolist()])
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(window[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49:
            click.echo(f"step {step + 1}  loss {mean:.3f}  {(time.time() - began) / (step + 1):.2f} s/step", err=True)
        if step % SAVE_STEPS == SAVE_STEPS - 1:
            on_save()
    return steps


@click.command(help=__doc__)
@click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder that becomes the checkpoint.")
@click.option("--minutes", default=45.0, show_default=True, help="End training after this long, whatever the steps.")
@click.option("--steps", default=4000, show_default=True)
@click.option("--rate", default=1e-3, show_default=True, help="Highest learning rate.")
@click.option("--hidden", default=512, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--vocab", default=2048, show_default=True, help="Tokens in the vocabulary.")
@click.option("--held-out", default=0.06, show_default=True, help="Share at the end of each file that is not trained on.")
@click.option("-t", "--threads", default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of torch.")
def main(
    texts: tuple[Path, ...],
    out: Path,
    minutes: float,
    steps: int,
    rate: float,
    hidden: int,
    layers: int,
    vocab: int,
    held_out: float,
    threads: int,
    device: str,
) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    training, judging = (list(side) for side in zip(*(split_text(path, held_out) for path in texts), strict=True))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(training, vocab)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    share = CHARACTERS // len(texts)
    for name, parts in (("calibration.txt", training), ("heldout.txt", judging)):
        (out / name).write_text("".join(part[:share].rpartition("\n")[0] + "\n" for part in parts), "utf-8")
    tokens = torch.tensor([i for text in training for i in tokenizer.encode(text).ids])
    held = torch.tensor(tokenizer.encode((out / "heldout.txt").read_text("utf-8")).ids)

    config = model_config(tokenizer.get_vocab_size(), hidden, layers)
    model = LlamaForCausalLM(config).float().to(device)
    card = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": len(tokens),
        "held_out_tokens": len(held),
        "unigram_perplexity": round(unigram_perplexity(tokens, held, config.vocab_size), 1),
    }
    click.echo(json.dumps(card), err=True)
    began = time.time()
    done = train(model, tokens.to(device), steps, minutes, rate, lambda: save(model, config, out))
    card |= {
        "steps": done,
        "tokens_seen": done * BATCH * CONTEXT,
        "minutes": round((time.time() - began) / 60, 1),
        "threads": threads,
        "torch": torch.__version__,
    }
    save(model, config, out)
    model.to("cpu").bfloat16().float()
    card["held_out_perplexity"] = round(perplexity(model.eval(), held), 3)
    (out / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    click.echo(json.dumps(card))


if __name__ == "__main__":
    main()
