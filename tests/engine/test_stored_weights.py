"Decoding from codes as a GGUF file or layers of 4 bits have them: each format, and whole models."

import math
import statistics

import pytest
import torch
from torch import nn

from trainkit import ModelConfig, QuantConfig, Transformer, generate, quantize_model
from trainkit.engine import Scheduler, StoredMatrix, StoredWeights
from trainkit.engine import stored_weights as stored
from trainkit.model import kernels
from trainkit.model.attention import KVCache
from trainkit.model.decoding import DecodePlan
from trainkit.quant.ggml import GGUFTensor, pack_blocks
from trainkit.quant.linear import Linear4bit

pytest.importorskip("numba")

# Each format is compiled once on a machine, which takes a few seconds
FIRST = ("Q4_K", "Q6_K", "Q8_0", "NF4")
KINDS = [
    kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.slow) for kind in stored.LAYOUTS
]


def in_blocks(name: str, weight: torch.Tensor, kind: str) -> GGUFTensor:
    data = pack_blocks(weight.detach().numpy(), kind).ravel()
    return GGUFTensor(name, kind, tuple(weight.shape), data)


def matrix_of(kind: str, weight: torch.Tensor) -> StoredMatrix:
    if kind in ("NF4", "FP4"):
        return StoredMatrix.from_layer(Linear4bit.from_weight(weight, quant_type=kind.lower()))
    if kind == "Q8_0":
        return StoredMatrix.from_weight(weight)
    return StoredMatrix.from_gguf(in_blocks("w", weight, kind))


def product(own, matrix: StoredMatrix, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.full((rows, matrix.size + 3), 7.0)  # What is behind the results stays
    blocks = torch.zeros(rows * columns // 32 * kernels.BLOCK, dtype=torch.uint8)
    at = own.round_rows(x.data_ptr(), 4 * columns, blocks.data_ptr(), 0, columns, rows)
    sides = matrix.codes.data_ptr(), matrix.scales.data_ptr()
    sizes = columns, *matrix.row_bytes, 0, 4 * y.shape[1], 0, matrix.size, rows
    own.product_part(*sides, at, y.data_ptr(), *sizes)
    assert (y[:, matrix.size :] == 7).all()
    return y[:, : matrix.size]


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_stored_numbers(kind):
    torch.manual_seed(0)
    weight = torch.randn(70, 512)
    weight[3] = 0
    matrix = matrix_of(kind, weight)
    rounded = 1e-2 if stored.LAYOUTS[kind].table else 1e-6  # A table has 8 bits
    for rows in (1, 2, 5, 15):
        x = torch.randn(rows, 512) * 10 ** torch.randn(rows, 1)
        x[-1, 32:64] = 0
        want = kernels.round_groups(x) @ matrix.unpack().T
        ours = product(stored.block_kernels(kind), matrix, x)
        assert (ours - want).norm() <= rounded * want.norm()


@pytest.mark.parametrize("kind", ["Q5_1", "Q6_K", "NF4", *(k for k in KINDS if type(k) is not str)])
def test_every_instruction_gives_the_same_bits(kind):
    torch.manual_seed(0)
    matrix = matrix_of(kind, torch.randn(20, 256))
    x, results = torch.randn(2, 256), []
    own = kernels.integer_instruction()
    others = {own, (own[0], min(own[1], 8)), ("", 4)}
    if own[0] == "vpdpbusd":  # Then it has the instructions of AVX2 too
        others.add(("pmaddubsw", 8))
    for instruction in others:
        functions = kernels.memory_functions() | dict(INTEGERS=True)
        names = "tile_eight", "tile_four", "tile_two", "tile_one"
        functions |= dict.fromkeys(names, stored.block_tile(kind, 1, instruction))
        functions["quantize_group"] = kernels.group_quantizer(None)
        parts = kernels.product_part, kernels.round_rows
        label = f"test stored {kind} {instruction}"
        compiled = kernels.compile_kernels(parts, functions, label)
        results.append(product(compiled, matrix, x))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_codes_are_shifted_where_the_instruction_knows_no_sign():
    "For a processor that may be another one than this."
    shifts = {kind: stored._shift(layout, "vpdpbusd") for kind, layout in stored.LAYOUTS.items()}
    assert {kind for kind, shift in shifts.items() if shift == 128} == {"Q8_0", "NF4", "FP4"}
    assert shifts["Q4_0"] == 8 and shifts["Q6_K"] == 32 and shifts["Q4_K"] == 0
    assert {stored._shift(layout, "sdot") for layout in stored.LAYOUTS.values()} == {0, 8, 16, 32}


def model_in_blocks(layers: int = 2) -> tuple[Transformer, dict[str, GGUFTensor]]:
    "A model whose matrices are Q4_K and Q6_K, and its tensors."
    torch.manual_seed(0)
    config = ModelConfig(203, 256, 4, layers, 512, n_kv_heads=2, tie_embeddings=False)
    model, tensors = Transformer(config).eval(), {}
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        nn.init.normal_(p, std=0.1)
        if "embed" in name:  # Few different numbers would lie halfway between two codes too often
            continue
        kind = "Q6_K" if "v_proj" in name or "head" in name else "Q4_K"
        tensors[name] = in_blocks(name, p, kind)
        p.data = torch.from_numpy(tensors[name].numbers())
    return model, tensors


def test_a_step_is_the_model_with_rounded_inputs():
    model, tensors = model_in_blocks(layers=1)
    packed = StoredWeights(model, tensors)
    assert packed.kinds == ("Q4_K", "Q6_K") and packed.head.kind == "Q6_K"

    def rounded(weight, rows):
        return lambda x: kernels.round_groups(x) @ weight.T

    plans = (
        kernels.PackedPlan(packed, KVCache(1, 9), 6),
        DecodePlan(model, KVCache(1, 9), 6, None, rounded),
    )
    ids, far = torch.arange(6), []
    for _ in range(9):
        ours, plain = (plan.step(ids) for plan in plans)
        far += ((ours - plain).norm(dim=1) / plain.norm(dim=1)).tolist()
        ids = plain.argmax(-1)
    # Another order of sums may round a number of x the other way, which is a step of 1 / 127
    assert statistics.median(far) < 1e-5 and max(far) < 2e-2


@pytest.mark.parametrize("source", ["file", "layers"])
def test_generate_and_the_scheduler_write_the_same_text(source):
    model, tensors = model_in_blocks()
    if source == "layers":
        model, tensors = quantize_model(model, QuantConfig(4)), None
    packed = StoredWeights(model, tensors)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 3]]
    alone = [generate(model, row, 9, temperature=0, weights=packed) for row in rows]
    assert generate(model, rows, 9, temperature=0, weights=packed) == alone
    requests = Scheduler(model, rows=3, weights=packed).generate(
        rows, 9, temperature=0, eos_token_id=()
    )
    assert [row + r.tokens for row, r in zip(rows, requests, strict=True)] == alone


def test_threads_change_no_bit():
    packed = StoredWeights(*model_in_blocks())
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            plan = kernels.PackedPlan(packed, KVCache(2, 8), 1)
            results.append(torch.cat([plan.step(torch.tensor([i])) for i in range(8)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_the_option_names_what_has_no_codes(tmp_path):
    from trainkit.recipes.commands import open_weights

    model, _ = model_in_blocks()
    with pytest.raises(ValueError, match="--weights stored: .* has no codes to use"):
        open_weights(model, tmp_path, "stored")


def test_what_cannot_be_read_is_named():
    model, tensors = model_in_blocks()
    with pytest.raises(ValueError, match="no weights in codes"):
        StoredWeights(model)
    model.model.layers[1].self_attn.q_proj.weight.data[5, 5] += 0.1
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight has changed"):
        StoredWeights(model, tensors)
    bad = Transformer(ModelConfig(203, 256, 4, 1, 512, position="learned")).eval()
    with pytest.raises(ValueError, match="position"):
        StoredWeights(quantize_model(bad, QuantConfig(4)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "nf4"])
def test_the_perplexity_is_that_of_the_plain_product(kind, tmp_path):
    "SmolLM2 in these codes, multiplied by the kernels and as float32."
    from trainkit import load_pretrained, save_pretrained
    from trainkit.interop import export_gguf, stored_tensors
    from trainkit.interop.hub import course_model

    if not course_model():
        pytest.skip("the model of the course is not installed")
    model, tokenizer = load_pretrained("smollm2-135m")
    if kind == "nf4":
        model = quantize_model(model, QuantConfig(4))
        packed = StoredWeights(model)
    else:
        save_pretrained(model, tokenizer, tmp_path / "model")
        file = tmp_path / "model.gguf"
        export_gguf(tmp_path / "model", file, kind, progress=False)
        model, _ = load_pretrained(file)
        packed = StoredWeights(model, stored_tensors(file, model.config))
    ids = torch.tensor(tokenizer.encode(math.__doc__ + str.__doc__ + open(__file__).read()))[:1900]

    def perplexity(logits):
        return nn.functional.cross_entropy(logits[:-1], ids[1:]).exp().item()

    plan = kernels.PackedPlan(packed, KVCache(model.config.n_layers, len(ids)))
    with torch.no_grad():
        plain = perplexity(model(ids[None]).logits[0])
    ours = perplexity(torch.cat([plan.read(part) for part in ids.split(64)]))
    assert abs(ours / plain - 1) < 0.005
