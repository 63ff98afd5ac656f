"""Does a run that is killed with SIGKILL at any moment, and resumed, end as an undisturbed run?

Runs with dropout, accumulation, evaluation and asynchronous checkpoints, on four kinds of
data, are killed again and again: in a step, in an evaluation, in the middle of a checkpoint's
bytes, before its rename, while an old one is deleted, and at a random time. At the end the
proof of the last checkpoint (weights, optimizer, schedule, random numbers, place in the data,
next batch), the metrics file and the order of the samples are compared with those of an
undisturbed run, to the last bit.

    python benchmarks/kill_resume.py [--kills 100] [--seed 0]
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

KINDS = ("drawing", "packed", "curriculum", "padded")
MOMENTS = ("step", "evaluation", "write", "rename", "rotate", "clock")
EXACT = (
    "event",
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "skipped_steps",
    "eval_loss",
    "eval_tokens",
    "best",
)
STEPS = 24


class Drawing:
    "Rows that are random pieces of one text, drawn when they are asked for, from three generators."

    def __len__(self):
        return 22

    def __getitem__(self, i):
        import numpy as np
        import torch

        start = random.randrange(20) + np.random.randint(20) + int(torch.randint(20, ()))
        return np.arange(start, start + 9 + i % 3) % 61


def make_batches(kind: str):
    "Batches of one of the four kinds."
    import numpy as np

    from trainkit.data.dataloader import CurriculumConfig
    from trainkit.data.dataloader import Batches
    from trainkit.data.dataloader import pack

    rows = [np.arange(i, i + 3 + i % 9) % 61 for i in range(40)]
    if kind == "drawing":
        return Batches(Drawing(), 3, seed=5, num_workers=2)
    if kind == "packed":
        return Batches(
            pack([dict(input_ids=row) for row in rows], 12, strategy="best_fit"),
            3,
            seed=5,
            num_workers=1,
        )
    if kind == "curriculum":
        return Batches(
            rows, 3, seed=5, curriculum=CurriculumConfig(start_length=4, end_length=11, steps=20)
        )
    return Batches(rows, 3, seed=5, group_by_length=True)


def train(
    folder: str, kind: str, moment: tuple[str, int] | None, asynchronous: bool | None
) -> None:
    "A run that resumes, and kills itself at a moment: at the n-th call of something."
    multiprocessing.set_start_method(
        "fork", force=True
    )  # Workers of the loader are to die with the run
    import numpy as np
    import torch

    import trainkit.train.checkpoint as checkpoint
    from trainkit.data.dataloader import Batches
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.train.optim import OptimConfig
    from trainkit.train.config import TrainConfig
    from trainkit.train.runs import RunFolder
    from trainkit.train.loggers import MetricsLog
    from trainkit.train.trainer import Trainer
    from trainkit.train.objectives import lm_loss, objective

    home, (name, left), seen = Path(folder), moment or ("", 0), []

    def now(what: str) -> None:
        nonlocal left
        if what == name:
            left -= 1
        if what == name and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(model, batch):
        now("step" if model.training else "evaluation")
        if model.training:
            seen.append(batch["input_ids"].sum().item())
        return lm_loss(model, batch)

    class Order:
        def on_step(self, trainer, record):
            with open(home / "order.txt", "a") as file:
                file.write(f"{record['step']} {seen}\n")
            seen.clear()

    real_write, real_replace = checkpoint.write_tensors, os.replace

    def write(path, tensors, *rest):
        if name == "write" and left == 1 and tensors:  # half of the bytes, then the end
            whole = real_write(path, tensors, *rest)["bytes"]
            os.truncate(path, whole // 2)
        now("write")
        return real_write(path, tensors, *rest)

    def replace(source, target):
        if Path(source).name.startswith(".checkpoint"):
            now("rename")
        real_replace(source, target)
        if str(target).endswith(".old"):
            now("rotate")

    checkpoint.write_tensors, os.replace = write, replace

    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=61, d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=16, dropout=0.2
        )
    )
    config = TrainConfig(
        output_dir=folder,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        save_steps=3,
        save_total_limit=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        progress=False,
        async_save=asynchronous,
    )
    test = Batches([np.arange(i, i + 8) % 61 for i in range(9)], 3, shuffle=False)
    with RunFolder(folder, resume=True) as log:
        Trainer(
            model,
            objective(counts=lm_loss.counts)(loss),
            make_batches(kind),
            test,
            config,
            [Order(), MetricsLog(log)],
            OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine"),
        ).train("auto")


def server():
    "Children that begin with everything imported."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "trainkit.train.trainer",
            "trainkit.train.loggers",
            "trainkit.data.dataloader",
            "trainkit.data.dataloader",
            "trainkit.model.transformer",
            "kill_resume",
        ]
    )
    return context


def start(
    context,
    folder: Path,
    kind: str,
    moment: tuple[str, int] | None,
    asynchronous: bool | None = True,
) -> bool:
    "Whether the run was killed before its end."
    child = context.Process(
        target=train,
        args=(str(folder), kind, None if moment and moment[0] == "clock" else moment, asynchronous),
    )
    child.start()
    if moment and moment[0] == "clock":  # milliseconds after its first sign of life
        began = (folder / "log.txt").stat().st_size if (folder / "log.txt").exists() else 0
        while child.is_alive() and not (
            (folder / "log.txt").exists() and (folder / "log.txt").stat().st_size > began
        ):
            time.sleep(0.002)
        time.sleep(moment[1] / 1000)
        child.kill()
    child.join()
    if child.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the run in {folder} ended with {child.exitcode}")
    return child.exitcode != 0


def ending(folder: Path) -> dict:
    "All that two runs must share."
    from trainkit.train.checkpoint import read_manifest
    from trainkit.train.checkpoint import find_checkpoints
    from trainkit.train.runs import read_metrics

    records = [
        {k: v for k, v in r.items() if k in EXACT}
        for r in read_metrics(folder / "metrics.jsonl")
        if r["event"] in ("log", "eval")
    ]
    order = dict(line.split(" ", 1) for line in (folder / "order.txt").read_text().splitlines())
    left = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return dict(
        proof=read_manifest(find_checkpoints(folder / "checkpoints")[-1])["proof"],
        metrics=records,
        order=order,
        left=left,
        model=(folder / "model" / "model.safetensors").read_bytes(),
        best=(folder / "best_model" / "model.safetensors").read_bytes(),
    )


def draw_moment(chance: random.Random) -> tuple[str, int]:
    "Where to kill next."
    name = chance.choice(MOMENTS)
    most = dict(step=14, evaluation=6, write=6, rename=2, rotate=1, clock=400)[name]
    return name, chance.randint(1, most)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    context, chance, root = server(), random.Random(args.seed), Path(tempfile.mkdtemp())
    kills = {kind: dict.fromkeys(MOMENTS, 0) for kind in KINDS}
    equal, done, wanted = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), {}
    try:
        for kind in KINDS:
            start(context, root / kind, kind, None, False)
            wanted[kind] = ending(root / kind)
        while sum(sum(k.values()) for k in kills.values()) < args.kills or not all(done.values()):
            kind = KINDS[sum(done.values()) % len(KINDS)]
            folder = root / f"{kind}-killed"
            shutil.rmtree(folder, ignore_errors=True)
            while start(context, folder, kind, moment := draw_moment(chance)):
                kills[kind][moment[0]] += 1
            done[kind] += 1
            equal[kind] += ending(folder) == wanted[kind]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(
        "| data | "
        + " | ".join(f"killed: {name}" for name in MOMENTS)
        + " | runs | equal to the last bit |"
    )
    print("|---" * (len(MOMENTS) + 3) + "|")
    for kind in KINDS:
        print(
            f"| {kind} | "
            + " | ".join(map(str, kills[kind].values()))
            + f" | {done[kind]} | {equal[kind]} |"
        )
    print(f"\n{sum(sum(k.values()) for k in kills.values())} kills")
    sys.exit(equal != done)


if __name__ == "__main__":
    main()
