"""Scaling laws of small models, and a run ten times larger than all of them that they predict.

Three parts, in this order; what is done already is read from the results and not repeated:
rates: a sweep of learning rates at widths 16, 64 and 256, in the usual parametrization and in µP;
runs: twelve runs of 0.1 to 0.5 million parameters, with the rate that µP's sweep at width 64 gave;
large: loss, time and memory of a run with ten times the FLOPs of the largest one are predicted and
written down, then the run is made.

Each run has one thread, and a process of its own. CPU seconds count, so that other programs
hardly matter.

    python benchmarks/laws.py [--out trainkit/train/scaling_runs.json] [--parts rates runs large]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "trainkit" / "train" / "scaling_runs.json"
VOCAB, LENGTH, ROWS, BASE, HEAD, INIT = 512, 64, 8, 64, 16, 0.1
STEP_TOKENS = ROWS * LENGTH
WIDTHS, RATES = (16, 64, 256), (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
SWEEP_STEPS = 150
SIZES = ((2, 64), (2, 96), (3, 112))  # Layers, width
STEPS = (128, 256, 512, 1024)
LARGE = dict(layers=6, width=192, steps=1800)
CHARS = 3_600_000


def prepare(folder):
    "The text as ids, once for all runs."
    import torch

    from trainkit.data.dataset import DataConfig, load_texts
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    train, held_out, _ = load_texts(DataConfig(path="bible", max_chars=CHARS))
    tokenizer = BPETokenizer.train((row["text"] for row in train[:60]), VOCAB)
    ids = {}
    for name, rows in (("train", train), ("eval", held_out)):
        text = torch.tensor([i for row in rows for i in tokenizer.encode(row["text"])])
        windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
        ids[name] = windows[
            torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        ]
    needed = LARGE["steps"] * ROWS
    if len(ids["train"]) < needed:
        raise SystemExit(f"{len(ids['train'])} rows of text, and the large run reads {needed}")
    torch.save(ids, folder / "ids.pt")


def model_of(layers, width, base):
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    config = ModelConfig(
        vocab_size=VOCAB,
        d_model=width,
        n_heads=width // HEAD,
        n_layers=layers,
        d_ff=3 * width,
        max_seq_len=LENGTH,
        init_std=INIT,
        mup_base_width=base,
    )
    return Transformer(config)


def optim_of(rate):
    from trainkit.train.optim import OptimConfig

    return OptimConfig(
        learning_rate=rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        warmup_ratio=0.1,
        min_lr_ratio=0.1,
    )


def resident(layers, width, base):
    "The main memory of a run's steps, predicted: tensors, kernels and what malloc keeps."
    from trainkit.memory.estimate import predict_memory

    def make():
        return model_of(layers, width, base)

    return predict_memory(make, ROWS, LENGTH, optim_of(1e-3), resident=True).resident


def judge(model, batches):
    "The mean loss of rows of one length."
    import torch

    model.eval()
    with torch.no_grad():
        losses = [model(**batch, return_logits=False).loss.item() for batch in batches]
    return sum(losses) / len(losses)


def train(layers, width, steps, rate, base, folder):
    "One run: its loss on text that it never saw, and what it took."
    import torch

    from trainkit.memory.estimate import memory_used, peak_memory_used
    from trainkit.model.config import count_flops, count_parameters
    from trainkit.train.config import TrainConfig
    from trainkit.train.monitors import SystemMonitor
    from trainkit.train.objectives import lm_loss
    from trainkit.train.trainer import Trainer

    ids = torch.load(folder / "ids.pt")
    batches = [dict(input_ids=x, labels=x) for x in ids["train"][: steps * ROWS].split(ROWS)]
    held_out = [dict(input_ids=x, labels=x) for x in ids["eval"][:256].split(32)]
    torch.manual_seed(0)
    model = model_of(layers, width, base)
    planned = resident(layers, width, base)
    monitor = SystemMonitor(peak_flops=1.0)
    trainer = Trainer(
        model,
        lm_loss,
        batches,
        config=TrainConfig(
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            logging_steps=max(1, steps // 4),
            eval_strategy="no",
            save_strategy="no",
            progress=False,
        ),
        optim=optim_of(rate),
        callbacks=[monitor],
    )
    before = memory_used()
    peak_memory_used(forget=True)
    began = time.process_time()
    result = trainer.train()
    seconds = time.process_time() - began
    return dict(
        layers=layers,
        width=width,
        mup_base_width=base,
        learning_rate=rate,
        parameters=count_parameters(model.config),
        tokens=result.steps * STEP_TOKENS,
        flops=monitor.spent()["flops"],
        formula_flops=result.steps * count_flops(model.config, ROWS, LENGTH, training=True),
        loss=judge(model, held_out),
        cpu_seconds=seconds,
        predicted_bytes=planned,
        peak_bytes=(peak_memory_used() or 0) - before + sum(p.nbytes for p in model.parameters()),
        energy_meter=monitor.energy.sees,
        **monitor.energy.totals,
    )


def in_process(folder, runs):
    words = [sys.executable, __file__, "--these", json.dumps(runs), "--folder", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def predict(runs):
    "What the twelve runs say about the large one."
    from trainkit.model.config import count_flops, count_parameters
    from trainkit.train.scaling import bootstrap_laws, fit_law, fit_power, interval

    N, D, L = ([run[key] for run in runs] for key in ("parameters", "tokens", "loss"))
    shape = model_of(LARGE["layers"], LARGE["width"], BASE).config
    parameters, tokens = count_parameters(shape), LARGE["steps"] * STEP_TOKENS
    flops = LARGE["steps"] * count_flops(shape, ROWS, LENGTH, training=True)
    seconds = fit_power([run["flops"] for run in runs], [run["cpu_seconds"] for run in runs])
    # What libraries keep is the same for a model of any size: differences, not ratios
    beyond = [run["peak_bytes"] - run["predicted_bytes"] for run in runs]
    step = resident(LARGE["layers"], LARGE["width"], BASE)
    laws = bootstrap_laws(N, D, L)
    return dict(
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parameters=parameters,
        tokens=tokens,
        flops=flops,
        loss=fit_law(N, D, L).loss(parameters, tokens),
        loss_interval=interval([law.loss(parameters, tokens) for law in laws]),
        cpu_seconds=seconds(flops),
        cpu_seconds_interval=seconds.interval(flops),
        peak_bytes=step + round(sum(beyond) / len(beyond)),
        peak_bytes_interval=[step + min(beyond), step + max(beyond)],
    )


def sweep(results, folder, base):
    "Every rate at every width, if it is not there yet."
    done = results.setdefault("rates", [])
    if not any(run["mup_base_width"] == base for run in done):
        done += in_process(
            folder,
            [
                dict(layers=2, width=width, steps=SWEEP_STEPS, rate=rate, base=base)
                for width in WIDTHS
                for rate in RATES
            ],
        )


def best_rate(results):
    "What µP's sweep at the base width says."
    at_base = [r for r in results["rates"] if r["width"] == BASE and r["mup_base_width"]]
    return min(at_base, key=lambda run: run["loss"])["learning_rate"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", default=["rates", "runs", "large"])
    parser.add_argument("--these", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.these:
        print(json.dumps([train(**run, folder=args.folder) for run in json.loads(args.these)]))
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}

    def save():
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        if "rates" in args.parts:
            for base in (BASE, None):
                sweep(results, folder, base)
                save()
        rate = best_rate(results)
        runs = results.setdefault("runs", [])
        shapes = [dict(layers=layers, width=w, steps=n) for layers, w in SIZES for n in STEPS]
        for shape in shapes[len(runs) :] if "runs" in args.parts else ():
            runs += in_process(folder, [dict(shape, rate=rate, base=BASE)])
            print(f"{shape} {runs[-1]['loss']:.4f} {runs[-1]['cpu_seconds']:.1f} s", flush=True)
            save()
        if "large" in args.parts and "large" not in results:
            results.setdefault("prediction", predict(runs))
            save()
            print(results["prediction"], flush=True)
            (results["large"],) = in_process(folder, [dict(LARGE, rate=rate, base=BASE)])
            save()
            print(results["large"], flush=True)


if __name__ == "__main__":
    main()
