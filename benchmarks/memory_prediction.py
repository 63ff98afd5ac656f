"""The main memory that a run predicts for a step before the first one, and what it used.

Each case is a run from a config in a process of its own, as `trainkit train` makes it:
pre-training of the quick profile, then from that model (or from --model, for example SmolLM2)
tuning of all weights, LoRA, DPO, GRPO on answers and on episodes in an environment, distillation.

    python benchmarks/memory_prediction.py [--model FOLDER] [--threads 1 2]
        [--methods pretrain sft lora dpo grpo episodes distill] [--steps 8] [--batch 16]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

METHODS = ("pretrain", "sft", "lora", "dpo", "grpo", "episodes", "distill")


def config_of(method, folder, model, steps, batch):
    "A run of this method; all but the first begin with a model."
    train = dict(
        output_dir=str(folder / method),
        max_steps=steps,
        per_device_train_batch_size=batch,
        eval_strategy="no",
        sample_steps=0,
        save_steps=max(1, steps // 2),
        progress=False,
    )
    if method == "pretrain":
        return dict(train=train, **(dict(init_from=str(model)) if Path(model).is_dir() else {}))
    rows = dict(dpo="pairs", grpo="prompts").get(method, "questions")
    lora = dict(r=16, lora_alpha=32, target_modules="all-linear")
    rl = dict(num_prompts=2, num_generations=batch // 2, max_completion_length=32)
    more = dict(
        dpo=dict(use_lora=True),
        distill=dict(
            distill=dict(teacher=str(model), max_completion_length=32),
            sft=dict(template="plain", questions=4),
        ),
        episodes=dict(
            method="grpo",
            use_lora=True,
            rl=dict(rl, environment="calculator"),
            sft=dict(template="chatml"),
        ),
        grpo=dict(use_lora=True, rl=rl),
    ).get(method, {})
    common = dict(
        method=method,
        init_from=str(model),
        data=dict(path=str(folder / "data" / f"{rows}.jsonl"), max_length=96),
        lora=lora,
        sft=dict(questions=4),
        train=train,
    )
    return {**common, **more}


def child(path):
    "Run a config, and print both numbers."
    from trainkit.memory.estimate import MemoryWatch
    from trainkit.recipes.config import method_config
    from trainkit.recipes.runner import run

    config = json.loads(Path(path).read_text())
    watches, begin = [], MemoryWatch.__init__

    def keep(self, *args, **more):
        begin(self, *args, **more)
        watches.append(self)

    MemoryWatch.__init__ = keep
    run(method_config(config), verbose=False)
    watch = watches[0]
    print(
        json.dumps(
            dict(
                predicted=watch.predicted,
                measured=watch.measured,
                parts=watch.report and {**watch.report.parts, **watch.report.beside},
                why=watch.why,
            )
        )
    )


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--model")
    ask.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    ask.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    ask.add_argument("--steps", type=int, default=8)
    ask.add_argument("--batch", type=int, default=16)
    ask.add_argument(
        "--parts", action="store_true", help="also print what the prediction consists of"
    )
    ask.add_argument("--child")
    args = ask.parse_args()
    if args.child:
        return child(args.child)
    from trainkit.data.readers import write_examples
    from trainkit.recipes.demo import demo_rows

    print("| method | threads | predicted, MB | measured, MB | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = demo_rows(60)
        for name, some in dict(
            questions=rows["questions"],
            pairs=rows["pairs"],
            prompts=[
                dict(prompt=r["prompt"], completion=r["completion"]) for r in rows["questions"]
            ],
        ).items():
            write_examples(some, folder / "data" / f"{name}.jsonl")
        for threads in args.threads:
            for method in args.methods:
                where = folder / str(threads)
                where.mkdir(exist_ok=True)
                config = config_of(
                    method,
                    where,
                    args.model or where / "pretrain" / "model",
                    args.steps,
                    args.batch,
                )
                if "data" in config:
                    config["data"]["path"] = config["data"]["path"].replace(str(where), str(folder))
                file = where / f"{method}.json"
                file.write_text(json.dumps(config))
                done = subprocess.run(
                    [sys.executable, __file__, "--child", str(file)],
                    capture_output=True,
                    text=True,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": str(threads),
                        "TRAINKIT_PROFILE": "quick",
                    },
                    check=False,
                )
                if done.returncode:
                    sys.exit(done.stderr)
                result = json.loads(done.stdout.splitlines()[-1])
                known = result["predicted"] and f"{result['predicted'] / 1e6:,.0f}"
                ratio = (
                    f"{result['predicted'] / result['measured']:.2f}"
                    if result["predicted"]
                    else result["why"]
                )
                print(
                    (
                        f"| {method} | {threads} | {known} | {result['measured'] / 1e6:,.0f} | "
                        f"{ratio} |"
                    ),
                    flush=True,
                )
                if args.parts:
                    print(
                        {
                            name: round(size / 1e6, 1)
                            for name, size in (result["parts"] or {}).items()
                            if size
                        },
                        file=sys.stderr,
                        flush=True,
                    )


if __name__ == "__main__":
    main()
