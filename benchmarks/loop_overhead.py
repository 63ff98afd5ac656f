"""What `Trainer` adds to a step, and what the loop that most people use takes for the same.

The same model, batches, optimizer and logging: a bare hand-written loop and `Trainer`, step
by step in turns; then `Trainer` and `transformers.Trainer` in turns, run by run, and the peak
memory of each in a process of its own.

    python benchmarks/loop_overhead.py [--steps 200] [--rounds 5]
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

os.environ.setdefault("OMP_NUM_THREADS", "1")
SIZES = ((2, 64, 4, 32), (4, 128, 8, 64), (4, 192, 16, 256))  # layers, width, rows, tokens in a row


def make(layers, width, length):
    import torch

    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            vocab_size=512,
            d_model=width,
            n_heads=4,
            n_layers=layers,
            d_ff=2 * width,
            max_seq_len=length,
        )
    )


def bare(steps):
    "Milliseconds of a step by hand and by `Trainer`, in turns."
    import torch

    from trainkit.data.dataloader import Batches
    from trainkit.train.objectives import lm_loss
    from trainkit.train.optim import OptimConfig, make_optimizer
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    print(
        "| layers x width, rows x tokens | bare loop, ms | Trainer, ms | bare / Trainer |\n"
        "|---|---|---|---|"
    )
    for layers, width, rows, length in SIZES:
        count = max(20, steps // (1 if length < 256 else 8))
        batches = list(Batches([list(range(length)) for _ in range(8 * rows)], rows))
        model = make(layers, width, length)
        optimizer = make_optimizer(model, OptimConfig())
        with ExitStack() as stack:
            trainer = Trainer(
                make(layers, width, length),
                lm_loss,
                batches,
                config=TrainConfig(max_steps=10**6, logging_steps=10, progress=False),
            )
            trainer.begin(stack, None)
            times = {"bare": [], "Trainer": []}
            for i in range(count):
                batch = batches[i % 8]
                began = time.process_time()
                model(
                    batch["input_ids"], labels=batch["labels"], return_logits=False
                ).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                middle = time.process_time()
                trainer.next_step(iter([[batch]]))
                times["bare"].append(middle - began)
                times["Trainer"].append(time.process_time() - middle)
        ms = [1000 * statistics.median(t) for t in times.values()]
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        print(
            f"| {layers} x {width}, {rows} x {length} | {ms[0]:.2f} | {ms[1]:.2f} | {ratio:.3f} |",
            flush=True,
        )


def llama(layers, width, length):
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=length,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def rows_of(count, length):
    return [[(7 * i + j * j) % 4096 for j in range(length)] for i in range(count)]


def ours(size, steps, ours_too=False):
    "CPU seconds of a run of `Trainer`; the model is transformers', or ours with the same shape."
    from trainkit.data.dataloader import Batches
    from trainkit.interop.families import from_hf
    from trainkit.train.objectives import lm_loss
    from trainkit.train.optim import OptimConfig
    from trainkit.train.config import TrainConfig
    from trainkit.train.trainer import Trainer

    layers, width, rows, length = size
    model = llama(layers, width, length)
    run = Trainer(
        from_hf(model) if ours_too else model,
        lm_loss,
        Batches(rows_of(8 * rows, length), rows),
        config=TrainConfig(max_steps=steps, logging_steps=10, mixed_precision="no", progress=False),
        optim=OptimConfig(),
    )
    began = time.process_time()
    run.train()
    return time.process_time() - began


def theirs(size, steps):
    "The same by `transformers.Trainer`, which logs as often and shows nothing."
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from trainkit.data.dataloader import collate

    layers, width, rows, length = size
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            logging_steps=10,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            optim="adamw_torch_fused",
            lr_scheduler_type="cosine",
            weight_decay=0.01,
        )
        run = Trainer(
            llama(layers, width, length),
            args,
            train_dataset=[dict(input_ids=row) for row in rows_of(8 * rows, length)],
            data_collator=collate,
        )
        run.remove_callback(PrinterCallback)
        began = time.process_time()
        run.train()
        return time.process_time() - began


RUNS = {
    "transformers.Trainer": theirs,
    "Trainer": ours,
    "Trainer, our model": lambda size, steps: ours(size, steps, True),
}


def resident(field):  # MiB of this process, now ('VmRSS') or at most ('VmHWM')
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def peak(name, size, steps):
    "Memory that one run adds to a fresh, warmed-up process, model included, in MiB (Linux)."
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); "
        "import loop_overhead as b\n"
        f"for run in b.RUNS.values(): run((1, 16, 1, 8), 1)\n"
        f'open("/proc/self/clear_refs", "w").write("5")\nbefore = b.resident("VmHWM")\n'
        f'b.RUNS[{name!r}]({size}, {steps})\nprint(b.resident("VmHWM") - before)'
    )
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        ).stdout.split()[-1]
    )


def peers(rounds):
    print(
        "\n| layers x width, rows x tokens | loop | tokens/s, CPU time | "
        "times transformers.Trainer | peak memory, MiB |\n"
        "|---|---|---|---|---|"
    )
    import contextlib
    import io

    for size, steps in (((2, 64, 4, 32), 60), ((4, 128, 8, 64), 20), ((4, 192, 8, 256), 4)):
        times = {name: [] for name in RUNS}
        for i in range(rounds + 1):
            for name, run in RUNS.items():
                with contextlib.redirect_stdout(io.StringIO()):
                    took = run(size, steps)
                if i:
                    times[name].append(took)  # the first round warms up
        for name, took in times.items():
            ratio = statistics.median(
                a / b for a, b in zip(times["transformers.Trainer"], took, strict=True)
            )
            speed = steps * size[2] * size[3] / statistics.median(took)
            memory = (
                f"{peak(name, size, steps):.0f}"
                if size[3] == 256 and os.path.exists("/proc/self/clear_refs")
                else ""
            )  # below, the difference drowns
            print(
                (
                    f"| {size[0]} x {size[1]}, {size[2]} x {size[3]} | {name} | {speed:,.0f} | "
                    f"{ratio:.2f} | {memory} |"
                ),
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("bare", "peers"))
    args = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)
    cpu = (
        next(
            (
                line.split(":")[1].strip()
                for line in open("/proc/cpuinfo")
                if line.startswith("model name")
            ),
            "",
        )
        if os.path.exists("/proc/cpuinfo")
        else ""
    )
    print(
        f"{cpu or platform.processor()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, 1 thread, fp32; CPU time, medians\n"
    )
    if args.only != "peers":
        bare(args.steps)
    if args.only != "bare":
        peers(args.rounds)


if __name__ == "__main__":
    main()
