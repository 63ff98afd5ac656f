"""Which numbers of the course are the same on another processor?

Bytes, token ids, counts and the order of the rows are integers, and equal everywhere. Floats are
rounded after each operation, and a processor with wider vectors adds the same numbers in another
order, so they differ in their last digits; a training amplifies the difference from step to step.

This trains the tour's model, once as this machine does it, once for each kind of processor that
it can imitate, and with other seeds, which change the first weights and the order of the rows.

    python benchmarks/processors.py [--steps 160] [--seeds 3] [--kinds AVX2 SSE]

A kind is a choice of kernels in torch, oneDNN and MKL. Another machine may have none of these
(ARM has kernels of its own), so a lesson gives a range at least as wide as that over the seeds.

    python benchmarks/processors.py --lessons nbs/04_train/08_trainer.ipynb …

runs lessons once for each kind instead, and lists the cells whose outputs differ, or that fail.
"""

import argparse
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "this machine": {},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
}
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRAINKIT_PROFILE": "quick",
    "COLUMNS": "100",
}


def pretrain(steps: int, seed: int) -> dict:
    "The tour's model and text: ids, losses, bits per byte of 32 held-out rows, a greedy text."
    from math import log

    from trainkit import RunConfig, Trainer, generate, lm_loss
    from trainkit.config import from_profile, load_config, to_dict
    from trainkit.recipes import prepare
    from trainkit.train.step import eval_loss

    words = f"""name=tour data.max_chars=1_000_000 data.max_length=128 tokenizer.vocab_size=1024
        model.d_model=128 model.n_heads=4 model.n_layers=2 model.d_ff=352 train.max_steps={steps}
        train.logging_steps=1 train.eval_strategy=no train.save_strategy=no train.sample_steps=0
        train.per_device_train_batch_size=16 train.progress=false train.seed={seed}
        optim.optim=muon optim.learning_rate=0.02"""
    config = load_config(RunConfig, to_dict(from_profile(RunConfig, "quick")), words.split())
    parts = prepare(config)
    trainer = Trainer(
        parts.model, lm_loss, parts.train_batches, config=config.train, optim=config.optim
    )
    history = trainer.train().history
    held_out = [batch for _, batch in zip(range(2), parts.eval_batches, strict=False)]
    nats = eval_loss(parts.model, lm_loss, held_out, trainer.accelerator)["loss"]
    rows = [row for batch in held_out for row in batch["input_ids"].tolist()]
    size = sum(len(parts.tokenizer.decode(row).encode()) for row in rows)
    start = parts.tokenizer.encode("In the beginning God created the heavens and the earth.")
    return dict(
        ids=hashlib.sha256(str([start, rows]).encode()).hexdigest()[:8],
        losses=[record["loss"] for record in history if "loss" in record],
        bits=nats / log(2) * sum(len(row) - 1 for row in rows) / size,
        text=generate(
            parts.model,
            "In the beginning",
            tokenizer=parts.tokenizer,
            temperature=0,
            max_new_tokens=12,
        ),
    )


def outputs(lesson: str) -> dict:
    "What each cell of a lesson shows, as text; pictures are left out."
    import warnings

    warnings.simplefilter("ignore")
    from execnb.shell import CaptureShell
    from fastcore.nbio import read_nb

    os.chdir(Path(lesson).parent)
    shell, shown = CaptureShell(Path(lesson)), {}
    for cell in read_nb(lesson).cells:
        first = cell.source.partition("\n")[0]
        if cell.cell_type != "code" or first.startswith(("#| slow", "#| gpu")):
            continue
        shell.cell(cell)
        shown[cell.id] = [shown_as(output) for output in cell.outputs]
    return shown


def shown_as(output: dict) -> str:
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    data = output.get("data", {})
    text = "".join(data.get("text/html") or data.get("text/plain") or output.get("text", ""))
    if "text/html" in data:
        text = re.sub(r"<(style|script|svg).*?</\1>|<[^>]+>", " ", text, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(text)).strip()


def child(kind: str, *words: object) -> tuple[dict, float]:
    "This program in a process of its own, as that kind of processor; CPU seconds."
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        began = os.times()
        subprocess.run(
            [sys.executable, __file__, "--child", out.name, *map(str, words)],
            env=os.environ | QUIET | KINDS[kind] | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        ended = os.times()
        spent = ended.children_user - began.children_user
        return json.loads(Path(out.name).read_text(encoding="utf-8")), spent


def compare_lessons(lessons: list[str]):
    for lesson in lessons:
        seen = {kind: child(kind, "--lessons", Path(lesson).resolve())[0] for kind in KINDS}
        print(f"## {lesson}")
        for cell, shown in seen["this machine"].items():
            ways: dict[str, list[str]] = {}
            for kind in KINDS:
                ways.setdefault(json.dumps(seen[kind][cell], ensure_ascii=False), []).append(kind)
            if len(ways) > 1 or any("Error: " in text for text in shown):
                print(f"\ncell {cell}")
                same = len(os.path.commonprefix([*ways])) - 40
                for text, kinds in ways.items():
                    print(f"  {', '.join(kinds)}: {text[max(same, 0) :][:200]}")


def compare_runs(steps: int, kinds: list[str], seeds: int):
    at = [step for step in (1, 10, 20, 40, 80, 160, 320) if step < steps] + [steps]
    print(f"| run | ids | {' | '.join(f'loss at {s}' for s in at)} | bits per byte | greedy text |")
    print("|---" * (len(at) + 4) + "|")
    runs = [(kind, 42) for kind in kinds] + [("this machine", seed) for seed in range(seeds)]
    for kind, seed in runs:
        found, _ = child(kind, "--steps", steps, "--seed", seed)
        losses = " | ".join(f"{found['losses'][s - 1]:.8f}" for s in at)
        name = kind if seed == 42 else f"seed {seed}"
        text = " ".join(found["text"].split())
        print(f"| {name} | {found['ids']} | {losses} | {found['bits']:.6f} | {text} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--lessons", nargs="+")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=42, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        found = (
            outputs(options.lessons[0])
            if options.lessons
            else pretrain(options.steps, options.seed)
        )
        options.child.write_text(json.dumps(found), encoding="utf-8")
    elif options.lessons:
        compare_lessons(options.lessons)
    else:
        compare_runs(options.steps, options.kinds, options.seeds)
