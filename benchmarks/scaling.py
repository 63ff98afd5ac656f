"""How the time per token grows with row length and model size, next to the closed form of FLOPs.

Forward and backward of `Transformer` (fp32, eager, one thread), and decoding of one token at
a time after a context of some length. The closed form is `trainkit.model.config.count_flops`,
without the half of attention that a causal kernel skips; its line is drawn through the middle
point, so only its shape is predicted. Points are measured in turns.

    python benchmarks/scaling.py [--rounds 3] [--lengths 256 512 1024 2048 4096 8192]
        [--svg FILE.html] [--device cuda]
"""

import argparse
import statistics
import time
from pathlib import Path

SIZES = ((2, 64), (2, 128), (4, 128), (4, 256), (6, 256), (6, 384), (8, 512))  # layers, width
VOCAB = 2048


def make(layers: int, width: int, length: int, device):
    import torch

    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB,
        d_model=width,
        n_heads=max(1, width // 64),
        n_layers=layers,
        d_ff=3 * width,
        max_seq_len=length,
    )
    return Transformer(config).to(device)


def flops(config, rows: int, length: int, cached: int = 0, training: bool = True) -> float:
    from trainkit.model.config import flops_by_part

    parts = flops_by_part(config, rows, length, cached)
    if not cached:
        parts["attention"] /= 2
    return sum(parts.values()) * (3 if training else 1)


class Train:
    "A point: forward and backward of some rows of `length` tokens."

    def __init__(self, layers: int, width: int, length: int, tokens: int, device):
        import torch

        self.model, rows = make(layers, width, length, device), max(1, tokens // length)
        self.ids, self.tokens, self.seconds = (
            torch.randint(VOCAB, (rows, length), device=device),
            rows * length,
            [],
        )
        self.work = flops(self.model.config, rows, length)

    def measure(self) -> None:
        start = time.perf_counter()
        self.model(self.ids, labels=self.ids, return_logits=False).loss.backward()
        self.model.model.norm.weight.grad.sum().item()  # waits for a GPU
        self.seconds.append(time.perf_counter() - start)
        self.model.zero_grad()


class Decode:
    "A point: one more token, again and again, behind `length` tokens."

    def __init__(self, layers: int, width: int, length: int, device, steps: int = 32):
        import torch

        from trainkit.model.attention import KVCache
        from trainkit.model.decoding import DecodePlan

        self.model = make(layers, width, length + steps, device).eval()
        self.cache, self.length, self.tokens, self.seconds = (
            KVCache(layers, length + steps),
            length,
            steps,
            [],
        )
        with torch.inference_mode():
            self.model(
                torch.randint(VOCAB, (1, length), device=device),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.plan = DecodePlan(self.model, self.cache, 1)
        self.work = steps * flops(self.model.config, 1, 1, cached=length, training=False)
        self.next = torch.zeros(1, dtype=torch.long, device=device)

    def measure(self) -> None:
        import torch

        self.cache.crop(self.length)
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(self.tokens):
                logits = self.plan.step(self.next)
        logits.sum().item()
        self.seconds.append(time.perf_counter() - start)


def report(title: str, x_label: str, points: dict, rounds: int) -> str:
    "Measure in turns, print a table, give the picture."
    from trainkit.charts import curves

    for i in range(rounds + 1):
        for point in points.values():
            point.measure()
            if not i:
                point.seconds.clear()  # warming up
    measured = {x: 1e6 * statistics.median(p.seconds) / p.tokens for x, p in points.items()}
    middle = sorted(points)[len(points) // 2]
    rate = points[middle].work / points[middle].tokens / measured[middle]
    predicted = {x: p.work / p.tokens / rate for x, p in points.items()}
    print(
        f"\n{title}\n"
        f"\n| {x_label} | µs per token | closed form | MFLOPs per token | GFLOP/s |\n"
        "|---|---|---|---|---|"
    )
    for x, p in points.items():
        per_token = p.work / p.tokens
        print(
            (
                f"| {x:,} | {measured[x]:,.0f} | {predicted[x]:,.0f} | {per_token / 1e6:,.1f} | "
                f"{per_token / 1e3 / measured[x]:,.1f} |"
            ),
            flush=True,
        )
    xs = list(points)
    return str(
        curves(
            {
                "measured": (xs, [measured[x] for x in xs]),
                "closed form": (xs, [predicted[x] for x in xs]),
            },
            title=title,
            x_label=x_label,
            y_label="µs per token",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--tokens", type=int, default=1024, help="in a batch, at least")
    parser.add_argument("--layers", type=int, default=4, help="of the model whose rows grow")
    parser.add_argument("--width", type=int, default=128, help="of the model whose rows grow")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--svg", metavar="FILE", help="an HTML page for the three pictures")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.device}, {args.threads} thread(s), fp32, "
        f"{args.rounds} rounds"
    )
    shape = f"{args.layers} layers of {args.width}"
    by_length = {
        n: Train(args.layers, args.width, n, args.tokens, args.device) for n in args.lengths
    }
    pictures = [report(f"Training by length, {shape}", "tokens in a row", by_length, args.rounds)]
    sizes = {
        p.model.num_parameters(): p
        for p in (Train(*size, 256, args.tokens, args.device) for size in SIZES)
    }
    pictures.append(report("Training by size, rows of 256", "parameters", sizes, args.rounds))
    decode = {n: Decode(args.layers, args.width, n, args.device) for n in args.lengths}
    pictures.append(
        report(f"One token at a time, {shape}", "tokens before it", decode, args.rounds)
    )
    if args.svg:
        Path(args.svg).write_text(
            '<!doctype html><meta charset="utf-8"><title>Scaling</title>' + "<br>".join(pictures)
        )


if __name__ == "__main__":
    main()
