"""Trains a draft layer (multi-token prediction) for the demo model, on its calibration text: something to draft with.

    python benchmarks/drafts/draft_model.py FOLDER [--steps 200]

Needs the `oracle` extra. The model itself is not changed. FOLDER gets the demo's files with the draft layer in one more shard
(bf16), num_nextn_predict_layers = 1 in config.json. Loss: cross entropy of the token after the next plus the divergence from
the model's own prediction of it, which is what a draft has to match.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
CONTEXT, BATCH, BLOCK = 256, 4, 128


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as float32, fp8 blocks multiplied by their scales; experts one by one."""
    stored = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    out = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        out[name], scale = tensor.float(), stored.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            out[name] *= scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return out


def load(folder: Path, tensors: dict[str, torch.Tensor], **changes: object) -> DeepseekV3ForCausalLM:
    """A model of transformers with these tensors, by way of a folder, so that it reads the names of the hub."""
    config = json.loads((DEMO / "config.json").read_text()) | changes
    config.pop("quantization_config")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    made = DeepseekV3ForCausalLM.from_pretrained(folder, config=DeepseekV3Config.from_pretrained(folder), dtype=torch.float32)
    shutil.rmtree(folder)
    return made


class DraftLayer(torch.nn.Module):
    """eh_proj @ [enorm(embedding), hnorm(hidden state)] through a model of one layer, which begins as the demo's last."""

    def __init__(self, block: DeepseekV3ForCausalLM, n: int, epsilon: float):
        super().__init__()
        self.block = block
        self.enorm, self.hnorm = (torch.nn.RMSNorm(n, eps=epsilon) for _ in range(2))
        self.eh_proj = torch.nn.Linear(2 * n, n, bias=False)
        with torch.no_grad():
            self.eh_proj.weight.copy_(torch.cat([0.5 * torch.eye(n), 0.5 * torch.eye(n)], 1))

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        return self.block(inputs_embeds=x).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(1)
    tensors, layers = decoded(DEMO), json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    model = load(options.folder / "scratch", tensors).eval().requires_grad_(False)
    last = f"model.layers.{layers - 1}."
    one = {name.replace(last, "model.layers.0."): t for name, t in tensors.items() if ".layers." not in name or last in name}
    block = load(options.folder / "scratch", one, num_hidden_layers=1, first_k_dense_replace=0)
    draft = DraftLayer(block, model.config.hidden_size, model.config.rms_norm_eps)
    block.model.embed_tokens.requires_grad_(False)
    block.lm_head.requires_grad_(False)
    tokens = torch.tensor(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode((DEMO / "calibration.txt").read_text()).ids)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=options.steps, pct_start=0.1)
    start = time.time()
    for step in range(options.steps):
        firsts = torch.randint(0, len(tokens) - CONTEXT, (BATCH,))
        batch = torch.stack([tokens[first : first + CONTEXT] for first in firsts])
        with torch.no_grad():
            hidden = model.model(batch).last_hidden_state
            own = model.lm_head(hidden[:, 1:-1])  # predicts tokens 2, 3, ...
            embeddings = model.model.embed_tokens(batch[:, 1:-1])
        logits = draft(embeddings, hidden[:, :-2])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 2:].flatten())
        apart = functional.kl_div(logits.log_softmax(-1).flatten(0, 1), own.softmax(-1).flatten(0, 1), reduction="batchmean")
        optimiser.zero_grad()
        (loss + apart).backward()
        optimiser.step()
        schedule.step()
        if step % 20 == 0 or step == options.steps - 1:
            same = (logits.argmax(-1) == own.argmax(-1)).float().mean()
            print(
                f"step {step}: loss {loss:.3f}, divergence {apart:.3f}, same {same:.1%}, {time.time() - start:.0f} s",
                flush=True,
            )
    write(options.folder, draft, layers)


def write(folder: Path, draft: DraftLayer, layers: int) -> None:
    """The demo's files and the draft layer, in DeepSeek-V3's layout."""
    scratch = folder / "scratch"
    draft.block.save_pretrained(scratch)
    state, top = load_file(scratch / "model.safetensors"), f"model.layers.{layers}."
    shutil.rmtree(scratch)
    own = {
        f"{top}{name}": state[f"model.layers.0.{name}"] for name in (n[15:] for n in state if n.startswith("model.layers.0."))
    }
    own[f"{top}shared_head.norm.weight"] = state["model.norm.weight"]
    own |= {f"{top}{part}.weight": getattr(draft, part).weight.detach() for part in ("enorm", "hnorm", "eh_proj")}
    for path in (*DEMO.glob("*.json"), *DEMO.glob("*.safetensors")):
        shutil.copy(path, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in own.items()}, folder / "draft.safetensors")
    index["weight_map"] |= dict.fromkeys(own, "draft.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2))


if __name__ == "__main__":
    main()
