"""transformers' own loop with its defaults, and a small Llama: an entry of the speedrun.

    python transformers_trainer.py --data train.jsonl --seed 1 --out model

AdamW with a rate of 5e-5 that falls linearly, batches of 8: what `TrainingArguments` holds if
nothing is set but the number of steps. The tokenizer is ours, with 4,096 tokens, since
transformers has none to learn one with.
"""

import argparse
import json

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from trainkit import BPETokenizer

LENGTH, STEPS = 256, 500


class Rows(torch.utils.data.Dataset):
    "Rows of equal length, cut from one stream of tokens."

    def __init__(self, ids: list[int]):
        count = len(ids) // LENGTH
        self.rows = torch.from_numpy(np.array(ids[: count * LENGTH])).view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    set_seed(options.seed)
    with open(options.data, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    tokenizer = BPETokenizer.train(texts, 4096, special_tokens=["<|endoftext|>"])
    ids = [i for text in texts for i in (tokenizer.eos_token_id, *tokenizer.encode(text))]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        options.out,
        max_steps=STEPS,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=Rows(ids)).train()
    model.save_pretrained(options.out)
    tokenizer.save(options.out)


if __name__ == "__main__":
    main()
