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

RATES = {"adamw_torch_fused": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (6e-3, 12e-3, 24e-3, 48e-3)}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(x.split(":")[1].strip() for x in info if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


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
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(args.threads)
    from trainkit.charts import curves
    from trainkit.data.dataset import DataConfig, load_texts
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.train.optim import OptimConfig, make_optimizer, make_schedule
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    train_rows, eval_rows, facts = load_texts(DataConfig(max_chars=args.chars))
    tokenizer = BPETokenizer.train((row["text"] for row in train_rows), args.vocab)
    ids, held_out = (
        torch.tensor([i for row in rows for i in tokenizer.encode(row["text"])])
        for rows in (train_rows, eval_rows)
    )

    def batch(step, text=ids, rows=args.rows):
        places = torch.randint(
            len(text) - args.length, (rows,), generator=torch.Generator().manual_seed(step)
        )
        return torch.stack([text[i : i + args.length] for i in places])

    judge = [batch(10**6 + i, held_out, 16) for i in range(8)]

    def start(optim, rate, steps):
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

    def train(optim, rate, steps, marks=12):
        model, optimizer, schedule = start(optim, rate, steps)
        curve, spent = [], [0.0, 0.0]
        for step in range(steps):
            began = time.perf_counter()
            x = batch(step)
            model(x, labels=x, return_logits=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            spent[0] += middle - began
            spent[1] += time.perf_counter() - middle
            if (step + 1) % max(1, steps // marks) == 0 or step + 1 == steps:
                with torch.no_grad():
                    loss = statistics.fmean(
                        model(x, labels=x, return_logits=False).loss.item() for x in judge
                    )
                curve.append((step + 1, loss))
        return curve, spent[1] / sum(spent)

    n = sum(p.numel() for p in start("muon", 1e-3, 1)[0].parameters())
    print(
        f"{processor()}, torch {torch.__version__}, {args.threads} thread(s), fp32; {facts.path}, "
        f"{len(ids):,} tokens of text; "
        f"{n:,} parameters, {args.steps} steps of {args.rows} x {args.length} tokens\n"
    )
    print("| optimizer | rate | held-out loss at the end |\n|---|---|---|")
    best, found = {}, {}
    for optim, rates in RATES.items():
        tried = {rate: train(optim, rate, args.steps) for rate in rates}
        best[optim] = min(tried, key=lambda rate: tried[rate][0][-1][1])
        found[optim] = tried[best[optim]]
        for rate, (curve, _) in tried.items():
            print(f"| {optim} | {rate:g} | {curve[-1][1]:.3f} |", flush=True)
    adam, muon = (dict(found[optim][0]) for optim in RATES)
    print(
        f"\n| tokens | {' | '.join(f'{optim}, rate {rate:g}' for optim, rate in best.items())} | "
        "difference |\n"
        "|---|---|---|---|"
    )
    for step in adam:
        print(
            f"| {step * args.rows * args.length:,} | {adam[step]:.3f} | {muon[step]:.3f} | "
            f"{adam[step] - muon[step]:+.3f} |"
        )
    last = adam[args.steps]
    reached = next((step for step in muon if muon[step] <= last), None)
    if reached:
        print(
            f"\nmuon has the last loss of adamw after {reached} steps, "
            f"{reached / args.steps:.0%} of its tokens"
        )
    print("\n| optimizer | share of a step |\n|---|---|")
    for optim, (_, share) in found.items():
        print(f"| {optim} | {share:.1%} |")
    if args.html:
        with open(args.html, "w", encoding="utf-8") as file:
            file.write(
                str(
                    curves(
                        {o: list(zip(*c, strict=True)) for o, (c, _) in found.items()},
                        "Held-out loss at equal tokens",
                        y_label="nats per token",
                    )
                )
            )

    model = start("adamw_torch", 1e-3, 1)[0]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    kinds = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
    made = {
        name: torch.optim.AdamW(model.parameters(), 1e-6, **knobs) for name, knobs in kinds.items()
    }
    spent = {name: [] for name in kinds}
    for turn in range(16):
        for name, optimizer in made.items():
            began = time.perf_counter()
            optimizer.step()
            if turn:
                spent[name].append(time.perf_counter() - began)
    print("\n| AdamW, one update | ms | x fused |\n|---|---|---|")
    fused = statistics.median(spent["fused"])
    for name, times in spent.items():
        print(
            f"| {name} | {1e3 * statistics.median(times):.1f} | "
            f"{statistics.median(times) / fused:.2f} |"
        )


if __name__ == "__main__":
    main()
