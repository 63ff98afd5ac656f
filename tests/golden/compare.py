"""Compare small trainings at two commits bit by bit: does a refactoring change a number?

    python tests/golden/compare.py main~1 main            # everything, about three minutes
    python tests/golden/compare.py main~1 . --only dpo    # one case; `.` is the working tree

Each commit is checked out into a work tree of its own. In each, on this machine, with one
thread and fixed seeds, the command line trains by every method, encodes a text with every
pattern and writes a GGUF file. Compared are the loss, the gradient norm and the learning rate
of every step, every evaluation, the weights, the ids and the files. Exits with 1, and names
each difference, if there is one. Not a test: pytest does not collect it.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("gpt2", "cl100k", "o200k")
NAMES = "zero one two three four five six seven eight nine ten eleven twelve".split()
CLOCKS = (
    "share",
    "percent",
    "second",
    "time",
    "memory",
    "mem_",
    "_mb",
    "per_s",
    "speed",
    "mfu",
    "joules",
    "eta",
    "pid",
    "host",
)

TINY = [
    "watch_memory=false",
    "runs_dir=runs",
    "train.logging_steps=1",
    "train.save_strategy=no",
    "train.progress=false",
    "train.sample_steps=0",
    "sampling.max_new_tokens=8",
]
TEXT = [
    "data.path=stdlib",
    "data.max_chars=60000",
    "data.max_length=64",
    "tokenizer.vocab_size=384",
    "model.d_model=64",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.n_layers=2",
    "model.d_ff=128",
    "model.max_seq_len=128",
]
STEPS = ["train.max_steps=6", "train.per_device_train_batch_size=4", "data.max_length=64"]
ADAPTER = ["lora.r=4", "lora.lora_dropout=0.1", "lora.target_modules=conservative"]
SCORED = ["rl.num_prompts=4", "rl.num_generations=4", "rl.max_completion_length=8", "rl.beta=0.05"]

# name -> the data file it reads, and its changes; all but the first start from the first's model
CASES = {
    "pretrain": ("", [*TEXT, "train.max_steps=12", "train.per_device_train_batch_size=8"]),
    "pretrain-muon": ("", [*TEXT, *STEPS, "optim.optim=muon", "optim.learning_rate=0.02"]),
    "sft": ("questions", [*STEPS, "train.gradient_accumulation_steps=2"]),
    "lora": ("questions", [*STEPS, *ADAPTER]),
    "qlora": ("questions", [*STEPS, *ADAPTER]),
    "freeze": ("questions", STEPS),
    "reward": ("pairs", STEPS),
    "dpo": ("pairs", STEPS),
    "kto": ("thumbs", STEPS),
    "grpo": ("answers", [*STEPS, *SCORED, "rl.rewards=right_format('.*[aeo].*')"]),
    "ppo": (
        "answers",
        [*STEPS, *SCORED, "rl.num_generations=1", "rl.rewards=right_format('.*[aeo].*')"],
    ),
}


def write_rows(folder: Path) -> None:
    "The small data sets, the same for both commits."
    pairs = [
        dict(prompt=f"Spell {n}.", chosen=NAMES[n], rejected=NAMES[(n + step) % len(NAMES)])
        for n in range(len(NAMES))
        for step in (1, 3, 5)
    ]
    questions = [dict(prompt=row["prompt"], completion=row["chosen"]) for row in pairs]
    answers = [dict(prompt=f"Spell {n}.", answer=name) for n, name in enumerate(NAMES)]
    thumbs = [
        dict(prompt=f"Spell {n}.", completion=NAMES[(n + (not good)) % len(NAMES)], label=good)
        for n in range(len(NAMES))
        for good in (True, False)
    ]
    rows = dict(pairs=pairs, questions=questions, answers=answers, thumbs=thumbs)
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def python(tree: Path, folder: Path, *words: str) -> str:
    "Run Python on the package of `tree` in `folder`, with one thread, offline; what it printed."
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRAINKIT_PROFILE": "quick",
        "TRAINKIT_SETTINGS": str(tree / "settings.ini"),
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)[:300]}\n"
            f"failed in {tree}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def weights(folder: Path) -> dict[str, str]:
    "Tensor -> digest of its bytes, for every safetensors file below `folder`."
    import torch
    from safetensors import safe_open

    tensors = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                key = f"{path.relative_to(folder)}:{name} {tuple(tensor.shape)} {tensor.dtype}"
                tensors[key] = digest(
                    tensor.contiguous().view(-1).view(dtype=torch.uint8).numpy().tobytes()
                )
    return tensors


def numbers(path: Path) -> dict[str, float]:
    "Every number that a run logged except clocks and memory: `step 3 log grad_norm` -> value."
    values = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if isinstance(value, (int, float)) and not any(word in key.lower() for word in CLOCKS):
                values[f"step {record.get('step')} {record.get('event')} {key}"] = value
    return values


def run_case(tree: Path, folder: Path, name: str) -> dict[str, object]:
    "One training from the command line."
    file, changes = CASES[name]
    words = [
        "-m",
        "trainkit",
        "train",
        f"name={name}",
        f"method={name.partition('-')[0]}",
        *TINY,
        *changes,
    ]
    if file:
        words += ["init_from=runs/pretrain/model", f"data.path={file}.jsonl"]
    python(tree, folder, *words)
    run = folder / "runs" / name
    return {**numbers(run / "metrics.jsonl"), **weights(run)}


def encode(tree: Path, folder: Path) -> dict[str, object]:
    "The ids of a text, with a tokenizer learned by each pattern."
    code = (
        "import argparse, json, sys\n"
        "from trainkit.tokenizer import BPETokenizer\n"
        "text = open(argparse.__file__, encoding='utf-8').read() + 'Ünïcödé 你好 １２３ "
        "\\u0301x\\r\\n\\t 12345 it\\'s' * 20\n"
        "for pattern in sys.argv[1:]:\n"
        "    tokenizer = BPETokenizer.train([text], 600, pattern=pattern)\n"
        "    print(json.dumps([pattern, tokenizer.encode(text)]))\n"
    )
    lines = python(tree, folder, "-c", code, *PATTERNS).splitlines()
    return {
        f"ids of {pattern}": digest(json.dumps(ids).encode())
        for pattern, ids in map(json.loads, lines)
    }


def export(tree: Path, folder: Path) -> dict[str, object]:
    "A GGUF file of the first model."
    python(tree, folder, "-m", "trainkit", "export", "gguf", "runs/pretrain/model", "model.gguf")
    return {"model.gguf": digest((folder / "model.gguf").read_bytes())}


def measure(tree: Path, only: list[str]) -> dict[str, dict[str, object]]:
    "Case -> name -> number or digest, for the package of `tree`."
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(folder)
        for name in CASES:
            if name == "pretrain" or not only or name in only:
                results[name] = run_case(tree, folder, name)
                print(f"  {name}: {len(results[name])} numbers and tensors", flush=True)
        if not only or "encode" in only:
            results["encode"] = encode(tree, folder)
        if not only or "export" in only:
            results["export"] = export(tree, folder)
    return results


def check_out(commit: str, folder: Path) -> Path:
    "A work tree of `commit`, or the tree that stands here for `.`."
    if commit == ".":
        return ROOT
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True
    )
    return folder


def differences(base: dict, head: dict) -> list[str]:
    "Each thing that is not the same, in words."
    out = []
    for case in base:
        for name in sorted({*base[case], *head[case]}):
            before, after = base[case].get(name), head[case].get(name)
            if before != after and not (before != before and after != after):  # NaN equals NaN here
                out.append(f"{case}: {name}: {before} before, {after} after")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the commit before")
    parser.add_argument("head", help="the commit after, or . for the working tree")
    parser.add_argument("--only", nargs="*", default=[], help=f"of {[*CASES, 'encode', 'export']}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = {}
        try:
            for name, commit in (("base", args.base), ("head", args.head)):
                trees[name] = check_out(commit, Path(scratch) / name)
            results = {}
            for name, tree in trees.items():
                print(f"{name}:", flush=True)
                results[name] = measure(tree, args.only)
        finally:
            for tree in trees.values():
                if tree != ROOT:
                    subprocess.run(
                        ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False
                    )
    wrong = differences(results["base"], results["head"])
    print(*wrong[:50], sep="\n")
    compared = sum(map(len, results["base"].values()))
    print(
        f"{len(wrong)} differences in {compared} numbers, tensors and files of "
        f"{len(results['base'])} cases"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
