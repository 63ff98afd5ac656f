"""Tricks from speedruns on GPUs, one at a time: an entry of the speedrun.

    trainkit speedrun tricks.py trick=zero_init

Without a trick this trains what `record.yaml model.n_layers=2 optim.lr_scheduler_type=linear` does:
two layers of width 192 and 8,192 tokens by Muon, but only 50 steps of 8 rows with 256 tokens.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit import BPETokenizer, ModelConfig, OptimConfig, Transformer, lm_loss, make_optimizer
from trainkit.data import encode_rows, token_blocks
from trainkit.interop import save_pretrained
from trainkit.train import make_schedule

LENGTH, ROWS, BATCH = 256, 400, 8
OPTIM = OptimConfig(
    optim="muon",
    learning_rate=0.01,
    warmup_ratio=0.05,
    weight_decay=0.1,
    adam_beta2=0.95,
    lr_scheduler_type="linear",
)
TRICKS = ("none", "zero_init", "value_embeddings", "ema", "distillation", "easy_first", "growth")


class ValueTransformer(Transformer):
    "Each layer adds an embedding of the token to the values of its attention."

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        width = config.kv_heads * config.head_width
        tables = (nn.Embedding(config.vocab_size, width) for _ in range(config.n_layers))
        self.value_tables = nn.ModuleList(tables)
        for layer, table in zip(self.model.layers, self.value_tables, strict=True):
            nn.init.normal_(table.weight, std=0.02)
            add = self.adding(table)
            layer.self_attn.v_proj.register_forward_hook(add)

    def adding(self, table: nn.Module):
        return lambda layer, inputs, values: values + table(self.read)

    def forward(self, input_ids: Tensor, *args, **kwargs):
        self.read = input_ids
        return super().forward(input_ids, *args, **kwargs)


# `trainkit speedrun` calls this for a model that no config describes
LOADER = f"""
from pathlib import Path
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from trainkit import BPETokenizer, ModelConfig
from tricks import ValueTransformer

def load(folder):
    saved = torch.load(Path(folder) / "value.pt", weights_only=True)
    model = ValueTransformer(ModelConfig(**saved["config"]))
    model.load_state_dict(saved["weights"])
    return model.eval(), BPETokenizer.load(folder)
"""


def in_batches(rows: list, trick: str) -> list[list]:
    "The rows of each step; `growth`: a third of them in batches of 4, of 8 and of 16 each."
    sizes = [4] * 33 + [8] * 17 + [16] * 8 if trick == "growth" else [BATCH] * (ROWS // BATCH)
    ends = np.cumsum(sizes)
    batches = [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [batch for batch in batches if batch]


def easy_first(rows: list, vocab_size: int) -> list:
    "Rows of frequent tokens first."
    counts = np.bincount(np.concatenate(rows), minlength=vocab_size) + 1
    cost = -np.log(counts / counts.sum())
    return sorted(rows, key=lambda row: cost[row].mean())


def distilled(model: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    "Half of the loss is the distance to what the teacher predicts."
    ids = batch["input_ids"]
    with torch.no_grad():
        soft = teacher(ids).logits[:, :-1].flatten(0, 1).softmax(-1)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    hard = F.cross_entropy(logits, ids[:, 1:].flatten())
    return (hard + F.cross_entropy(logits, soft)) / 2


def train(model: nn.Module, batches: list[list], teacher: nn.Module | None, ema: bool) -> None:
    "A step for each batch; with `ema` the model ends as the average of its later weights."
    optimizer = make_optimizer(model, OPTIM)
    schedule = make_schedule(optimizer, OPTIM, len(batches))
    average: dict[str, Tensor] = {}
    model.train()
    for step, rows in enumerate(batches):
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        batch = dict(input_ids=ids, labels=ids)
        if teacher is not None:
            loss = distilled(model, teacher, batch)
        else:
            total, count, _ = lm_loss(model, batch).terms["loss"]
            loss = total / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if ema and 2 * step >= len(batches):
            for name, p in model.named_parameters():
                average.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if average:
        model.load_state_dict(average, strict=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("trick", nargs="?", default="trick=none")
    options = parser.parse_args()
    trick = options.trick.removeprefix("trick=")
    if trick not in TRICKS:
        parser.error(f"{options.trick}: trick= one of {', '.join(TRICKS)}")
    torch.manual_seed(options.seed)
    with open(options.data, encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    tokenizer = BPETokenizer.train(
        [t["text"] for t in texts], 8192, special_tokens=["<|endoftext|>"]
    )
    rows = [
        row for row in token_blocks(encode_rows(texts, tokenizer), LENGTH) if len(row) == LENGTH
    ]
    order = np.random.default_rng(options.seed).permutation(len(rows))[:ROWS]
    rows = [rows[i] for i in order]
    if trick == "easy_first":
        rows = easy_first(rows, tokenizer.vocab_size)

    def build(layers: int) -> Transformer:
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=192,
            n_heads=6,
            n_layers=layers,
            d_ff=512,
            max_seq_len=LENGTH,
        )
        return ValueTransformer(config) if trick == "value_embeddings" else Transformer(config)

    teacher, batches = None, in_batches(rows, trick)
    if trick == "distillation":  # Its time counts, so it is small and learns half as long
        teacher = build(1)
        train(teacher, batches[: len(batches) // 2], None, False)
        teacher.eval()
    model = build(2)
    if trick == "zero_init":
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    train(model, batches, teacher, trick == "ema")
    model.eval()
    if trick == "value_embeddings":
        folder = Path(options.out)
        folder.mkdir()
        tokenizer.save(folder)
        shape = vars(model.config)
        torch.save(dict(config=shape, weights=model.state_dict()), folder / "value.pt")
        (folder / "model.py").write_text(LOADER)
    else:
        save_pretrained(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
