"The least and the most that functions take: accepted at the bound, refused with an error beyond."

import numpy as np
import pytest
import torch
from torch import nn

from trainkit.align.environments import GuessNumber, calculate
from trainkit.align.rewards import right_length
from trainkit.align.rl import zero_std_groups
from trainkit.align.search import share_interval
from trainkit.config import seed_everything
from trainkit.data.dataloader import Batches, token_blocks
from trainkit.data.dataset import chunk_examples
from trainkit.data.dedup import choose_bands
from trainkit.data.mixture import mix, shares
from trainkit.eval.code_eval import pass_at_k
from trainkit.eval.scoring import bits_per_byte, windows
from trainkit.eval.stats import proportion
from trainkit.lora.layers import lora_plus
from trainkit.memory.offload import checkpoint_blocks, freeze
from trainkit.memory.planner import find_machine
from trainkit.model.attention import KVCache
from trainkit.parallel import in_order
from trainkit.progress import Progress
from trainkit.quant.nf4 import quantize_4bit
from trainkit.recipes.speedrun import p_below
from trainkit.settings import OptimConfig
from trainkit.tokenizer.bpe import count_words, learn_merges
from trainkit.train.checkpoint import rotate_checkpoints
from trainkit.train.lr_finder import growing_rates
from trainkit.train.optim import AdamW8bit, make_schedule
from trainkit.train.scaling import fit_law, fit_power
from trainkit.widgets.drawing import live_curves

ROWS = [dict(input_ids=[1, 2]), dict(input_ids=[3])]
TEXTS = [dict(text="ab"), dict(text="c")]


def adamw(**knobs):
    return AdamW8bit([nn.Parameter(torch.ones(4))], **knobs)


def schedule(steps):
    return make_schedule(torch.optim.SGD([nn.Parameter(torch.ones(1))]), OptimConfig(), steps)


def blocks(every):
    return checkpoint_blocks(nn.Sequential(*map(nn.Linear, (2, 2), (2, 2))), None, every, [])


def frozen(last_n):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return freeze(model, last_n)


def law(n):
    sizes = [1e6 * 2**i for i in range(n)]
    return fit_law(sizes, sizes[::-1], [3 - 0.1 * i for i in range(n)], count=4)


# Name -> (function of one value, values that it takes, values that it refuses)
BOUNDS = {
    "calculate": (lambda n: calculate("1+1".ljust(n)), [200], [201]),
    "GuessNumber, range": (lambda high: GuessNumber(5, high), [6], [5, 4]),
    "GuessNumber, guesses": (lambda n: GuessNumber(guesses=n), [1], [0]),
    "right_length": (lambda cache: right_length(9, cache), [1], [0]),
    "zero_std_groups": (lambda size: zero_std_groups(torch.arange(6.0), size), [2, 3], [1, 4]),
    "seed_everything": (seed_everything, [2**32 - 1, 0], [-1, 2**32]),
    "token_blocks": (lambda n: token_blocks(np.arange(9), n), [2], [1]),
    "token_blocks, ids": (lambda n: token_blocks(np.arange(n), 4), [2], [1]),
    "Batches": (lambda n: Batches(ROWS, n), [1], [0]),
    "chunk_examples": (lambda n: [*chunk_examples(TEXTS, n)], [1], [0]),
    "choose_bands": (lambda t: choose_bands(t, miss=0.9), [1, 0.9], [0, 1.01]),
    "shares, temperature": (lambda t: shares([1, 2], temperature=t), [0.5], [0, -1]),
    "shares, weights": (lambda w: shares([1, 2], w), [[0, 1]], [[0, 0], [-1, 2]]),
    "mix": (lambda n: mix({"a": TEXTS}, total=n), [1, 0], [-1]),
    "pass_at_k, k": (lambda k: pass_at_k(4, 2, k), [1, 4], [0, 5]),
    "pass_at_k, correct": (lambda c: pass_at_k(4, c, 2), [0, 4], [-1, 5]),
    "windows": (lambda stride: windows(9, 4, stride), [1, 3], [0, 4]),
    "bits_per_byte": (lambda n: bits_per_byte(2.0, 3, n), [1], [0]),
    "proportion, n": (lambda n: proportion(0, n), [1], [0]),
    "proportion": (lambda k: proportion(k, 3), [0, 3], [-1, 4]),
    "level": (lambda level: proportion(1, 3, level), [0.01, 0.99], [0, 1]),
    "lora_plus": (lambda ratio: lora_plus(OptimConfig(), ratio), [0.5], [0, -1]),
    "checkpoint_blocks": (blocks, [1], [0]),
    "freeze": (frozen, [0, 2], [-1, 3]),
    "find_machine": (lambda size: find_machine(size), [1.0], [0, -1]),
    "in_order, workers": (lambda n: [*in_order(list, [1], n)], [0, 1], [-1]),
    "in_order, chunk": (lambda n: [*in_order(list, [1], 0, n)], [1], [0]),
    "Progress": (lambda n: Progress(n, "Title", where="silent"), [0, None], [-1]),
    "quantize_4bit": (lambda n: quantize_4bit(torch.ones(4, 4), blocksize=n), [2, 4], [0, 1, 3]),
    "quantize_4bit, codes": (
        lambda top: quantize_4bit(torch.ones(64), codebook=torch.linspace(-1, top, 16)),
        [1.0],
        [1.5],
    ),
    "count_words": (lambda n: count_words(["a b"], num_proc=n), [1, None], [0]),
    "learn_merges": (lambda n: learn_merges({b"ab": 2}, n, "python"), [0, 1], [-1]),
    "growing_rates, steps": (lambda n: growing_rates(1e-4, 1, n), [10], [9]),
    "growing_rates": (lambda end: growing_rates(0.1, end, 10), [0.2], [0.1, 0.05]),
    "make_schedule": (schedule, [1], [0]),
    "AdamW8bit, rate": (lambda lr: adamw(lr=lr), [0.0], [-1e-3]),
    "AdamW8bit, betas": (lambda b: adamw(betas=(b, b)), [0, 0.99], [1, -0.1]),
    "AdamW8bit, eps": (lambda eps: adamw(eps=eps), [0], [-1e-8]),
    "fit_law": (law, [6], [5]),
    "fit_power": (lambda n: fit_power([1, 2, 4, 8][:n], [8, 4, 2, 1][:n]), [3, 4], [2]),
    "p_below": (lambda n: p_below([1.0, 2.0, 3.0][:n], 2.5), [2], [1]),
    "live_curves": (lambda s: live_curves({"a": [1, 2]}, smooth=s), [0, 0.99], [1, -0.1]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_functions(name, tmp_path):
    function, taken, refused = BOUNDS[name]
    for value in taken:
        function(value)
    for value in refused:
        with pytest.raises(ValueError):
            function(value)


def test_a_cache_is_cropped_to_at_most_its_length():
    cache = KVCache(1, 4)
    assert cache.length == 0
    cache.crop(0)
    for wrong in (-1, 1):
        with pytest.raises(ValueError):
            cache.crop(wrong)


def test_checkpoints_may_all_be_deleted_but_not_fewer(tmp_path):
    rotate_checkpoints(tmp_path, 0)
    with pytest.raises(ValueError):
        rotate_checkpoints(tmp_path, -1)


@pytest.mark.parametrize("numbers", [[0, 0, 0], [1, 1, 1, 1], [0, 1, 1]])
def test_shares_that_are_all_or_nothing_have_wilsons_interval(numbers):
    interval = share_interval(numbers, resamples=50)
    wilson = proportion(sum(numbers), len(numbers))
    assert (interval.low, interval.value, interval.high) == (wilson.low, wilson.value, wilson.high)
    assert share_interval([0.5, *numbers], resamples=50).high <= 1
