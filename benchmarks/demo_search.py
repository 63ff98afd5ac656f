"""Which settings of the quick profile read best in the CPU time of the demo?

Bits per byte of the demo's held-out text, after as many CPU seconds as 400 AdamW steps of
16 x 256 tokens take.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from trainkit.recipes.evaluation import Bits
from trainkit.recipes.config import method_config
from trainkit.train.objectives import lm_objective
from trainkit.recipes.preparation import prepare_text
from trainkit.train.trainer import Trainer

BEFORE = (
    "optim.optim=adamw_torch_fused optim.learning_rate=3e-3 optim.min_lr_ratio=0.1 "
    "train.per_device_train_batch_size=16 tokenizer.vocab_size=4096"
)  # of 400 steps
CANDIDATES = [
    "",
    "optim.learning_rate=0.02",
    "train.per_device_train_batch_size=4",
    "tokenizer.vocab_size=4096",
    "model.tie_embeddings=false",
    "model.qk_norm=true",
]  # changes of the profile as it is
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--share", type=float, default=0.05, help="of the CPU seconds of the 400 steps; 1 is the whole"
)
parser.add_argument(
    "--try",
    dest="tried",
    action="append",
    help='changes, such as "optim.learning_rate=0.02"; may be given several times',
)


class Clock:
    "Notes the CPU seconds at the end of each step."

    def __init__(self):
        self.times = []

    def on_step(self, trainer, *_, **__):
        self.times.append(time.process_time())

    def pace(self):
        return statistics.median(
            b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)
        )


def train(changes, steps):
    "Trainer and clock of a run that only trains."
    quiet = [
        "train.eval_strategy=no",
        "train.save_strategy=no",
        "train.sample_steps=0",
        "train.progress=false",
    ]
    config = method_config(None, [*quiet, *changes.split(), f"train.max_steps={steps}"], "quick")
    parts, clock = prepare_text(config), Clock()
    bits = Bits(sum(len(row["text"].encode()) for row in parts.eval_rows))
    trainer = Trainer(
        parts.model,
        lm_objective(),
        parts.train_batches,
        parts.eval_batches,
        replace(config.train, output_dir=""),
        [clock],
        config.optim,
    )
    began = time.process_time()
    trainer.train()
    return trainer, bits, clock, time.process_time() - began


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| settings | steps | CPU seconds | of | bits per byte |\n|---|---|---|---|---|")
    for changes in [BEFORE, *(args.tried or CANDIDATES)]:
        before, pace = (
            train(BEFORE, 8)[2].pace(),
            train(changes, 8)[2].pace(),
        )  # close in time, since others use the machine
        budget = 400 * args.share * before
        trainer, bits, _, seconds = train(changes, max(2, round(budget / pace)))
        record = trainer.evaluate()
        bits.on_eval(trainer, record)
        print(
            (
                f"| {changes or 'as it is'} | {trainer.total_steps} | {seconds:.0f} | "
                f"{budget:.0f} | {record['eval_bits_per_byte']:.3f} |"
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
