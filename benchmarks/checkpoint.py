"""The cost of a checkpoint over writing its bytes alone, and of a step while one is written.

The state is that of a model in the shape of SmolLM2-135M with AdamW: weights and two moments,
all float32. `bytes alone` writes the same bytes from the same memory to files of the same
sizes, and syncs them to the disk (fsync). `torch.save` pickles weights and optimizer into one
file and syncs that. `save_checkpoint` writes, hashes, syncs, verifies and renames. They take
turns on the same disk, and the median of the ratios of neighbours counts.

Then the asynchronous writer: how long the run waits for it, how long it takes, and how long
steps take meanwhile.

    python benchmarks/checkpoint.py [--rounds 3] [--layers 30] [--folder .]
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from trainkit.train.checkpoint import load_checkpoint, save_checkpoint, take_snapshot
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.checkpoint import raw_bytes
from trainkit.train.checkpoint import CheckpointWriter


def state(layers: int):
    "A model and an optimizer that has taken a step."
    model = Transformer(
        ModelConfig(
            vocab_size=49152,
            d_model=576,
            n_heads=9,
            n_kv_heads=3,
            n_layers=layers,
            d_ff=1536,
            max_seq_len=2048,
        )
    )
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bytes_alone(folder: Path, model, optimizer) -> None:
    snapshot = take_snapshot(model, optimizer, state=dict(step=1))
    folder.mkdir()
    for name, group in snapshot.tensors.items():
        with open(folder / name, "wb") as file:
            for tensor in group.values():
                file.write(raw_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())


def pickled(folder: Path, model, optimizer) -> None:
    folder.mkdir()
    with open(folder / "all.pt", "wb") as file:
        torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), file)
        file.flush()
        os.fsync(file.fileno())


def ours(folder: Path, model, optimizer) -> None:
    save_checkpoint(folder, model, optimizer, state=dict(step=1))


def spent(do) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def time_ways(
    root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rounds: int
) -> dict[str, list[float]]:
    "Seconds of each way to write the state, in turns; the first round is not counted."
    ways = {"bytes alone": bytes_alone, "torch.save": pickled, "save_checkpoint": ours}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way(root / "one", model, optimizer)
            duration = time.perf_counter() - began
            shutil.rmtree(root / "one")
            if n:
                seconds[name].append(duration)
    return seconds


def time_writer(
    root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rounds: int
) -> tuple[list[float], ...]:
    "Seconds of steps alone and during a write, of the calls to save, and of the writes."
    batch = torch.randint(49152, (1, 32))

    def step():
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()

    alone, meanwhile, standing, writing = [], [], [], []
    with CheckpointWriter(root / "run", 1, asynchronous=True) as writer:
        for n in range(rounds + 1):
            alone += [spent(step) for _ in range(3)]
            began = time.perf_counter()
            writer.save(take_snapshot(model, optimizer, state=dict(step=n)))
            standing.append(time.perf_counter() - began)
            steps = []
            while writer.busy:
                steps.append(spent(step))
            writing.append(time.perf_counter() - began)
            if n:
                meanwhile.extend(steps[:-1] or steps)
    return alone, meanwhile, standing, writing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument(
        "--folder", type=Path, default=None, help="On which disk [default: that of temporary files]"
    )
    args = parser.parse_args()
    model, optimizer = state(args.layers)
    size = take_snapshot(model, optimizer, state=dict(step=1)).bytes
    root = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        seconds = time_ways(root, model, optimizer, args.rounds)
        once = save_checkpoint(root, model, optimizer, state=dict(step=1))
        loading = spent(lambda: load_checkpoint(once, model, optimizer))
        shutil.rmtree(once)
        times = time_writer(root, model, optimizer, args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    median = statistics.median
    alone, meanwhile, standing, writing = times
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.system()}, "
        f"Python {sys.version.split()[0]}\n"
    )
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters with AdamW, "
        f"{size / 1e6:,.0f} MB; {args.rounds} rounds\n"
    )
    print("| way | seconds | × the bytes alone (less is better) |\n|---|---|---|")
    for name, took in seconds.items():
        print(
            f"| {name} | {median(took):.2f} | "
            f"{median(a / b for a, b in zip(took, seconds['bytes alone'], strict=True)):.2f} |"
        )
    print(f"\nLoading it, every hash checked: {loading:.2f} s\n")
    print("| asynchronous | seconds |\n|---|---|")
    print(
        f"| the run stands still, the first time | {standing[0]:.2f} |\n"
        f"| the run stands still, later | {median(standing[1:]):.2f} |"
    )
    print(f"| until the checkpoint is there | {median(writing[1:]):.2f} |")
    print(
        f"| a step, nothing being written | {median(alone[1:]):.3f} |\n"
        f"| a step meanwhile | {median(meanwhile):.3f} "
        f"({median(meanwhile) / median(alone[1:]):.2f} ×) |"
    )


if __name__ == "__main__":
    main()
