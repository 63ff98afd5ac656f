"The finder of learning rates: known answers, fastai's readings, and no trace in the trainer."

import math
import random

import pytest
import torch
from torch import nn

from trainkit.train.config import TrainConfig
from trainkit.train.lr_finder import LRCurve, growing_rates, lr_find, rate_changes
from trainkit.train.lr_finder import steepest, valley
from trainkit.train.objectives import Loss, objective
from trainkit.train.optim import OptimConfig
from trainkit.train.trainer import Trainer

STEPS = 60


class Bowl(nn.Module):
    "½ Σ hᵢ wᵢ², noisy by dropout where asked, with a buffer that counts its calls."

    def __init__(self, curvatures, dropout=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.ones(len(curvatures)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.h, self.drop = torch.tensor(curvatures), nn.Dropout(dropout)


@objective()
def height(model, batch):
    model.calls += 1
    w = model.drop(model.w)
    return Loss({"bowl": (0.5 * (model.h * w * w).sum() * batch["scale"].mean(), 1, 1.0)})


class Cursor:
    "Batches that know their position."

    def __init__(self, batches):
        self.batches, self.index = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.index < len(self.batches):
            self.index += 1
            yield self.batches[self.index - 1]
        self.index = 0

    def state_dict(self):
        return dict(index=self.index, epoch=0)

    def load_state_dict(self, state):
        self.index = state["index"]


BATCHES = [{"scale": torch.tensor([[s]])} for s in (1.0, 0.9, 1.1, 1.0)]


def trainer(curvatures=(40.0,), dropout=0.0, batches=BATCHES, sgd=True, **how):
    make = (lambda model, optim: torch.optim.SGD(model.parameters(), lr=1.0)) if sgd else None
    config = TrainConfig(
        **dict(max_grad_norm=0, progress=False, save_strategy="no", max_steps=6, logging_steps=1)
        | how
    )
    rate = 1.0 if sgd else 1e-2
    return Trainer(
        Bowl(curvatures, dropout),
        height,
        batches,
        config=config,
        build_optimizer=make,
        optim=OptimConfig(learning_rate=rate, optim="adamw_torch"),
    )


@pytest.mark.parametrize("curvature", [0.5, 40.0, 3000.0])
def test_the_wall_of_a_bowl_is_at_two_over_its_curvature(curvature):
    edge = 2 / curvature
    one = [{"scale": torch.ones(1, 1)}]
    curve = lr_find(trainer((curvature,), batches=one), edge / 1e3, edge * 1e2, 200, smoothing=0)
    lowest = curve.rates[curve.losses.index(min(curve.losses))]
    assert edge / 1.13 < lowest < edge * 1.13 and "diverged" in curve.stopped
    assert curve.suggestions["minimum"] < edge and curve.rate < edge


@pytest.mark.parametrize("sgd", [True, False])
def test_a_test_leaves_no_trace(sgd):
    "Weights, buffers, gradients, random numbers and data are as before, and so is the run."
    torch.manual_seed(3)
    one = trainer((3.0, 1.0), 0.2, Cursor(BATCHES), sgd)
    one.train_batches.index = 2
    one.model.w.grad = grad = torch.full((2,), 0.5)
    weights = one.model.w.data
    before = [*(v.clone() for v in one.model.state_dict().values()), torch.get_rng_state()]
    python = random.getstate()
    lr_find(one, 1e-4, 10, STEPS)
    after = [*one.model.state_dict().values(), torch.get_rng_state()]
    assert all(map(torch.equal, before, after)) and random.getstate() == python
    assert one.model.w.grad is grad and one.model.w.data_ptr() == weights.data_ptr()
    assert one.train_batches.index == 2 and one.model.training
    one.train_batches.index, one.model.w.grad = 0, None
    other = trainer((3.0, 1.0), 0.2, Cursor(BATCHES), sgd)
    losses = [[r["loss"] for r in t.train().history] for t in (one, other)]
    assert losses[0] == losses[1] and torch.equal(one.model.w, other.model.w)


def test_the_optimizer_of_a_run_is_not_the_one_of_the_test():
    one = trainer((3.0, 1.0), sgd=False)
    one.train()
    state = {k: v.clone() for k, v in one.raw_optimizer.state[one.model.w].items()}
    weights = one.model.w.detach().clone()
    lr_find(one, 1e-4, 10, STEPS)
    now = one.raw_optimizer.state[one.model.w]
    assert torch.equal(weights, one.model.w)
    assert all(torch.equal(value, now[name]) for name, value in state.items())
    assert one.raw_optimizer.param_groups[0]["params"][0] is one.model.w


def test_an_error_in_the_middle_leaves_no_trace_either():
    one = trainer(batches=[*BATCHES, {"nothing": torch.ones(1, 1)}])
    with pytest.raises(KeyError, match="scale"):
        lr_find(one, 1e-4, 10, STEPS)
    assert one.model.w.item() == 1.0 and int(one.model.calls) == 0


def _as_in_fastai(losses):
    "The indices of `valley` and `steep`, in the words of their descriptions."
    best = [1] * len(losses)
    end = 0
    for i in range(1, len(losses)):
        for j in range(i):
            if losses[i] < losses[j] and best[i] < best[j] + 1:
                best[i] = best[j] + 1
        end = i if best[end] < best[i] else end
    third = best[end] / 3
    return end - best[end] + int(third) + int(third / 2)


def test_the_readings_are_those_of_fastai():
    generator = random.Random(0)
    for _ in range(40):
        n = generator.randint(12, 80)
        losses = [5 - 3 * i / n + generator.gauss(0, 0.3) for i in range(n)]
        rates = growing_rates(1e-6, 1, n)
        assert valley(losses) == _as_in_fastai(losses)
        slopes = torch.tensor(losses).diff() / torch.tensor(rates).log().diff()
        assert steepest(rates, losses) == int(slopes.argmin())


def test_what_a_curve_says():
    rates = growing_rates(1e-6, 1.0, 100)
    flat = [8.3 - 3 * max(0, min(1, (math.log10(r) + 4.5) / 2.5)) for r in rates]
    curve = LRCurve(rates, flat)
    assert math.isclose(curve.smooth[0], flat[0]) and curve.smooth[-1] > flat[-1]
    assert 1e-4 < curve.rate < 1e-1 and "valley" in str(curve)
    assert "lowest" in curve.picture().label and "<svg" in curve._repr_html_()
    rising = LRCurve(rates, [1.0 + i for i in range(100)])
    assert rising.suggestions == {} and "never fell" in str(rising)
    with pytest.raises(ValueError, match="the loss never fell"):
        assert rising.rate
    both = OptimConfig(optim="muon", learning_rate=2e-3, muon_learning_rate=2e-2)
    assert rate_changes(both, 1.04e-3) == dict(learning_rate=1e-3, muon_learning_rate=1e-2)


@pytest.mark.parametrize(
    "how, words",
    [
        (dict(start=1.0, end=0.1), "0 < start < end"),
        (dict(start=0.0), "0 < start < end"),
        (dict(steps=5), "at least 10 steps"),
        (dict(smoothing=1.0), "less than 1"),
    ],
)
def test_wrong_tests_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        lr_find(trainer(), **how)


def test_batches_that_come_only_once_are_refused():
    class Stream:
        def __init__(self):
            self.rest = list(BATCHES)

        def __iter__(self):
            return self

        def __next__(self):
            if not self.rest:
                raise StopIteration
            return self.rest.pop()

    one = trainer(batches=Stream())
    with pytest.raises(ValueError, match="is an iterator"):
        lr_find(one)
    assert len(one.train_batches.rest) == 4
