"""The cost of an AdamW step with 8-bit states: ours, bitsandbytes', and torch's fused float32.

One square matrix, in turns, medians. The states of the first three are compared byte for
byte first.

    python benchmarks/adamw8bit.py [--width 2048] [--rounds 11]
"""

import argparse
import contextlib
import io
import logging
import os
import platform
import statistics
import time


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
    for name, value in dict(width=2048, rounds=11, threads=1).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    clock = (
        time.process_time if args.threads == 1 else time.perf_counter
    )  # One thread: what others do on the machine does not count
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        import bitsandbytes
    from trainkit.train.optim import AdamW8bit

    makers = {
        "trainkit AdamW8bit, numba": lambda p: AdamW8bit(p, backend="numba"),
        "trainkit AdamW8bit, python": lambda p: AdamW8bit(p, backend="python"),
        "bitsandbytes AdamW8bit": bitsandbytes.optim.AdamW8bit,
        "torch AdamW, fused, float32": lambda p: torch.optim.AdamW(p, fused=True),
    }
    params, optimizers, spent = {}, {}, {name: [] for name in makers}
    for name, make in makers.items():
        torch.manual_seed(0)
        params[name] = torch.nn.Parameter(torch.randn(args.width, args.width))
        optimizers[name] = make([params[name]])
    for turn in range(args.rounds + 2):
        grad = torch.randn(args.width, args.width)
        for name, optimizer in optimizers.items():
            params[name].grad = grad.clone()
            began = clock()
            optimizer.step()
            if turn > 1:
                spent[name].append(clock() - began)
    first, *others = list(makers)[:3]
    one = optimizers[first].state[params[first]]
    equal = all(
        torch.equal(one[k], optimizers[name].state[params[name]][k])
        for name in others
        for k in ("state1", "state2", "absmax1", "absmax2")
    )
    equal = equal and all(torch.equal(params[first], params[name]) for name in others)
    times = {name: statistics.median(x) for name, x in spent.items()}
    print(
        f"{processor()}, {args.threads} thread, torch {torch.__version__}, "
        f"bitsandbytes {bitsandbytes.__version__}, {platform.python_version()}; "
        f"{args.width**2 / 1e6:.1f} M parameters, {args.rounds} rounds; "
        f"weights and states of the first three are {'equal' if equal else 'NOT EQUAL'}\n"
    )
    print(
        "| optimizer | milliseconds | × bitsandbytes | × fused | state, bytes a parameter |\n"
        "|---|---|---|---|---|"
    )
    for name, seconds in times.items():
        own = [
            x
            for x in optimizers[name].state[params[name]].values()
            if isinstance(x, torch.Tensor) and x.numel() > 256
        ]
        size = sum(x.nbytes for x in own) / args.width**2
        print(
            f"| {name} | {1e3 * seconds:.1f} | {seconds / times['bitsandbytes AdamW8bit']:.2f} | "
            f"{seconds / times['torch AdamW, fused, float32']:.1f} | {size:.3f} |"
        )


if __name__ == "__main__":
    main()
