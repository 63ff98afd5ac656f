"Messages about a step that does not fit or is not finite, and how pieces change a gradient."

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainkit.lora.inject import LoRAConfig, add_lora
from trainkit.train.config import TrainConfig
from trainkit.train.objectives import Loss
from trainkit.train.recovery import find_nonfinite, nonfinite_error
from trainkit.train.step import OOMRetry, StepTooBig, gradient_differences, oom_message


def batch(rows, tokens):
    return dict(input_ids=torch.zeros(rows, tokens), weights=torch.zeros(rows))


@pytest.mark.parametrize(
    "sizes, pieces, changes, words",
    [
        ([(4, 7)], 1, {}, None),
        ([(1, 7)], 1, {}, "with 1 row of up to 7 tokens at once, which cannot be cut: gradient"),
        ([(4, 7), (8, 1200)], 8, {}, "with 1 row of up to 1,200 tokens at once"),
        ([(4, 7), (8, 9)], 4, {}, None),
        ([(9, 7)], 8, dict(additive=False), "with 2 rows of up to 7 tokens. The objective couples"),
        ([(9, 7)], 2, dict(backward=True), "with 5 rows of up to 7 tokens, and optimizer_in_back"),
        ([(8, 7)], 2, dict(processes=2), "with 4 rows of up to 7 tokens in process 1, and the oth"),
    ],
)
def test_why_a_step_cannot_be_cut(sizes, pieces, changes, words):
    def objective():
        pass

    objective.additive = changes.get("additive", True)
    accelerator = SimpleNamespace(num_processes=changes.get("processes", 1), process_index=1)
    batches, backward = [batch(*size) for size in sizes], changes.get("backward", False)
    reason = oom_message(objective, batches, pieces, accelerator, backward)
    assert reason.startswith(f"Out of memory {words}") if words else reason == ""


def test_rows_without_tokens_are_counted():
    pairs = [dict(scores=torch.zeros(1), chosen_input_ids=torch.zeros(1, 5))]
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    assert "1 row of up to 5 tokens" in oom_message(None, pairs, 1, accelerator, False)
    assert "with 1 row at" in oom_message(None, [dict(x=torch.zeros(1))], 1, accelerator, False)


class Attention(nn.Module):
    dropout = 0.1


def adapted_layer(dropout):
    config = LoRAConfig(r=1, target_modules=["0"], lora_dropout=dropout)
    return add_lora(nn.Sequential(nn.Linear(2, 2)), config)


@pytest.mark.parametrize(
    "layer, trains, words",
    [
        (nn.Linear(2, 2), True, ": the same gradient"),
        (nn.Dropout(0.1), True, ", with other dropout masks"),
        (nn.Dropout(0.1), False, ": the same gradient"),
        (nn.Dropout(0.0), True, ": the same gradient"),
        (Attention(), True, ": the same gradient"),
        (nn.MultiheadAttention(2, 1, dropout=0.5), True, ", with other dropout masks"),
        (adapted_layer(0.5), True, ", with other dropout masks"),
        (adapted_layer(0.0), True, ": the same gradient"),
        (nn.BatchNorm1d(2), True, ", which changes the gradient"),
        (nn.BatchNorm1d(2), False, ": the same gradient"),
    ],
)
def test_what_pieces_change(layer, trains, words):
    assert gradient_differences(nn.Sequential(layer).train(trains)).startswith(words)


@pytest.mark.parametrize("needed, pieces", [(6, 1), (3, 2), (2, 4), (1, 8)])
def test_a_batch_is_halved_until_it_fits(needed, pieces, monkeypatch):
    "Each message names the rows of a piece; a single row that does not fit is an error."
    monkeypatch.setattr(torch.cuda, "empty_cache", None)  # Nothing asks for a GPU
    said, states, model = [], set(), nn.Linear(1, 1, bias=False)

    def objective(model, rows):
        count = len(rows["input_ids"])
        if not done:
            states.add(torch.get_rng_state().numpy().tobytes())
        done.append(count)
        if count > needed:
            torch.rand(3)
            done.clear()
            raise torch.OutOfMemoryError("out of memory")
        return Loss(dict(loss=(model.weight.sum() * count, count, 1.0)))

    from accelerate import Accelerator

    done, retry = [], OOMRetry(say=said.append)
    retry(model, objective, [batch(6, 2)], Accelerator(cpu=True))
    assert retry.pieces == pieces and sum(done) == 6
    assert len(states) == 1, "each attempt begins with the same random numbers"
    cut = [2**i for i in range(1, int(math.log2(pieces)) + 1)]
    assert [text.split("split into ")[1].split(" rows")[0] for text in said] == [
        f"{n} pieces of at most {math.ceil(6 / n)}" for n in cut
    ]
    if needed == 1:
        needed = 0
        with pytest.raises(StepTooBig, match="1 row of up to 2 tokens at once"):
            retry(model, objective, [batch(6, 2)], Accelerator(cpu=True))


@pytest.mark.parametrize(
    "terms, names, found",
    [
        ([], [], (None, "")),
        ([(0, dict(a=1.0)), (3, dict(a=1.0, b=math.nan))], ["w"], (3, "the term 'b'")),
        ([(1, dict(a=math.inf, b=math.nan))], [], (1, "the terms 'a', 'b'")),
        ([(1, dict(a=1.0))], ["u", "v", "w"], (None, "the gradient of u, v, w")),
        ([], ["u", "v", "w", "x", "y"], (None, "the gradient of u, v, w and 2 more")),
    ],
)
def test_what_was_not_finite(terms, names, found):
    step = SimpleNamespace(batch_terms=terms, nonfinite_params=names)
    assert find_nonfinite(step) == found


@pytest.mark.parametrize("limit, shorter", [(1.0, "0.1"), (0.25, "0.025"), (0.0, "1")])
def test_a_shorter_gradient_is_suggested(limit, shorter):
    "Where nothing was cut off, the usual limit."
    config = TrainConfig(max_grad_norm=limit)
    error = nonfinite_error("the loss is nan", 3, config, 1e-3, None)
    assert f"(max_grad_norm={limit:g}): try {shorter}." in str(error)
