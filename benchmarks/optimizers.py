"""AdamW and Muon on the tour's corpus: held-out loss after the same tokens, and time per step.

Same model, weights, batches and schedule; each optimizer with the best of its rates, each
tried over the whole run. Then the cost: the optimizer's share of a step, and what each kind
of AdamW costs (loop, foreach, fused), in turns, medians.

    python benchmarks/optimizers.py [--steps 300] [--width 128] [--layers 4] [--rows 16]
        [--length 128] [--html curves.html]
"""

import argparse
import os
import platform
import statistics
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402

from trainkit.charts import curves  # noqa: E402
from trainkit.data.dataset import DataConfig, load_texts  # noqa: E402
from trainkit.model.config import ModelConfig  # noqa: E402
from trainkit.model.transformer import Transformer  # noqa: E402
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer  # noqa: E402
from trainkit.train.optim import OptimConfig, make_optimizer, make_schedule  # noqa: E402

RATES = {"adamw_torch_fused": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (6e-3, 12e-3, 24e-3, 48e-3)}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(x.split(":")[1].strip() for x in info if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Comparison:
    "Corpus, batches and runs that all optimizers share."

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        train_rows, eval_rows, self.facts = load_texts(DataConfig(max_chars=args.chars))
        tokenizer = BPETokenizer.train((row["text"] for row in train_rows), args.vocab)
        self.ids, held_out = (
            torch.tensor([i for row in rows for i in tokenizer.encode(row["text"])])
            for rows in (train_rows, eval_rows)
        )
        self.eval_batches = [self.batch(10**6 + i, held_out, 16) for i in range(8)]

    def batch(self, step: int, text: torch.Tensor, rows: int) -> torch.Tensor:
        length, generator = self.args.length, torch.Generator().manual_seed(step)
        places = torch.randint(len(text) - length, (rows,), generator=generator)
        return torch.stack([text[i : i + length] for i in places])

    def start(self, optim: str, rate: float, steps: int):
        "Model, optimizer and schedule of a run."
        args = self.args
        torch.manual_seed(0)
        model = Transformer(
            ModelConfig(
                vocab_size=args.vocab,
                d_model=args.width,
                n_heads=args.width // 32,
                n_layers=args.layers,
                d_ff=3 * args.width,
                max_seq_len=args.length,
            )
        )
        config = OptimConfig(
            learning_rate=rate,
            optim=optim,
            weight_decay=0.1,
            adam_beta2=0.95,
            warmup_ratio=0.05,
            min_lr_ratio=0.1,
        )
        optimizer = make_optimizer(model, config)
        return model, optimizer, make_schedule(optimizer, config, steps)

    @torch.no_grad()
    def eval_loss(self, model: Transformer) -> float:
        losses = (model(x, labels=x, return_logits=False).loss.item() for x in self.eval_batches)
        return statistics.fmean(losses)

    def train(self, optim: str, rate: float, marks: int = 12) -> tuple[list, float]:
        "The curve of the held-out loss, and the optimizer's share of the time."
        steps = self.args.steps
        model, optimizer, schedule = self.start(optim, rate, steps)
        curve, gradient_time, update_time = [], 0.0, 0.0
        for step in range(steps):
            began = time.perf_counter()
            x = self.batch(step, self.ids, self.args.rows)
            model(x, labels=x, return_logits=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            gradient_time += middle - began
            update_time += time.perf_counter() - middle
            if (step + 1) % max(1, steps // marks) == 0 or step + 1 == steps:
                curve.append((step + 1, self.eval_loss(model)))
        return curve, update_time / (gradient_time + update_time)


def best_rates(comparison: Comparison) -> dict[str, tuple]:
    "For each optimizer its best rate, and the curve and share of that run; prints all of them."
    print("| optimizer | rate | held-out loss at the end |\n|---|---|---|")
    best = {}
    for optim, rates in RATES.items():
        runs = {rate: comparison.train(optim, rate) for rate in rates}
        rate = min(runs, key=lambda rate: runs[rate][0][-1][1])
        best[optim] = (rate, *runs[rate])
        for rate, (curve, _) in runs.items():
            print(f"| {optim} | {rate:g} | {curve[-1][1]:.3f} |", flush=True)
    return best


def print_curves(best: dict[str, tuple], args: argparse.Namespace) -> None:
    adam, muon = (dict(best[optim][1]) for optim in RATES)
    heads = " | ".join(f"{optim}, rate {rate:g}" for optim, (rate, _, _) in best.items())
    print(f"\n| tokens | {heads} | difference |\n|---|---|---|---|")
    for step in adam:
        tokens, difference = step * args.rows * args.length, adam[step] - muon[step]
        print(f"| {tokens:,} | {adam[step]:.3f} | {muon[step]:.3f} | {difference:+.3f} |")
    last = adam[args.steps]
    reached = next((step for step in muon if muon[step] <= last), None)
    if reached:
        share = reached / args.steps
        print(f"\nmuon has adamw's last loss after {reached} steps, {share:.0%} of its tokens")
    print("\n| optimizer | share of a step |\n|---|---|")
    for optim, (_, _, share) in best.items():
        print(f"| {optim} | {share:.1%} |")


def write_curves(best: dict[str, tuple], path: str) -> None:
    lines = {optim: list(zip(*curve, strict=True)) for optim, (_, curve, _) in best.items()}
    chart = curves(lines, "Held-out loss at equal tokens", y_label="nats per token")
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(chart))


def time_adamw(model: Transformer) -> None:
    "The cost of an update by each of torch's implementations, in turns."
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    kinds = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), 1e-6, **knobs) for name, knobs in kinds.items()
    }
    seconds = {name: [] for name in kinds}
    for turn in range(16):
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    print("\n| AdamW, one update | ms | x fused |\n|---|---|---|")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"| {name} | {1e3 * median:.1f} | {median / medians['fused']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(
        steps=300, width=128, layers=4, rows=16, length=128, vocab=2048, chars=1_500_000, threads=1
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--html", help="write the curves there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    comparison = Comparison(args)
    n = sum(p.numel() for p in comparison.start("muon", 1e-3, 1)[0].parameters())
    print(
        f"{processor()}, torch {torch.__version__}, {args.threads} thread(s), fp32; "
        f"{comparison.facts.path}, {len(comparison.ids):,} tokens of text; "
        f"{n:,} parameters, {args.steps} steps of {args.rows} x {args.length} tokens\n"
    )
    best = best_rates(comparison)
    print_curves(best, args)
    if args.html:
        write_curves(best, args.html)
    time_adamw(comparison.start("adamw_torch", 1e-3, 1)[0])


if __name__ == "__main__":
    main()
