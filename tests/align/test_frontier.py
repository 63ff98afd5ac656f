"The small game: closed forms equal sums over all answers, and no policy is above the frontier."

import itertools
import math

import pytest
import torch

from trainkit.align import TokenGame


def game_of(seed):
    "A game of 27 answers with ties, and a reference."
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 7, (27,), generator=generator).tolist()
    game = TokenGame(3, 3, lambda a: table[9 * a[0] + 3 * a[1] + a[2]] / 5 - 0.3)
    reference = 2 * torch.randn(27, generator=generator, dtype=torch.float64)
    return game, reference.log_softmax(0), generator


@pytest.mark.parametrize("seed", range(3))
def test_best_of_n_equals_a_count_of_all_samples(seed):
    game, reference, _ = game_of(seed)
    chances, rewards = reference.exp().tolist(), game.rewards.tolist()
    for n in (1, 2, 3):
        counted = [0.0] * 27
        for drawn in itertools.product(range(27), repeat=n):
            top = max(rewards[i] for i in drawn)
            best = [i for i in drawn if rewards[i] == top]
            for i in best:
                counted[i] += math.prod(chances[j] for j in drawn) / len(best)
        expected = torch.tensor(counted, dtype=torch.float64)
        assert (game.best_of(n, reference).exp() - expected).abs().max() < 1e-14
    many = game.best_of(10**6, reference)
    assert many.exp().sum().item() == pytest.approx(1, abs=1e-12)
    assert game.place(many, reference)[1] == pytest.approx(max(rewards), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_frontier_is_exact_and_nothing_is_above_it(seed):
    game, reference, generator = game_of(seed)
    for beta in (0.02, 0.1, 0.5, 3.0):
        value, best = game.leashed(reference, beta)
        spread, reward = game.place(best, reference)
        terms = [(p.exp() * (p - q)).item() for p, q in zip(best, reference, strict=True)]
        assert spread == pytest.approx(math.fsum(terms), abs=1e-12)
        assert reward - beta * spread == pytest.approx(value, abs=1e-9)
        assert game.ceiling(reference, spread) == pytest.approx(reward, abs=1e-9)
    for size in (0.05, 0.5, 3.0):
        noise = torch.randn(27, generator=generator, dtype=torch.float64)
        for policy in (reference + size * noise, reference + game.rewards / size + 0.1 * noise):
            spread, reward = game.place(policy.log_softmax(0), reference)
            assert reward <= game.ceiling(reference, spread) + 1e-9
    for n in (2, 5, 40):
        spread, reward = game.place(game.best_of(n, reference), reference)
        assert spread <= math.log(n) - (n - 1) / n  # Beirami et al. 2024
        assert reward <= game.ceiling(reference, spread) + 1e-9


def test_the_reference_has_no_divergence_and_impossible_answers_cost_nothing():
    game, reference, _ = game_of(0)
    assert game.place(reference, reference)[0] == 0
    certain = torch.full((27,), -torch.inf, dtype=torch.float64)
    certain[3] = 0.0
    spread, reward = game.place(certain, reference)
    assert spread == pytest.approx(-reference[3].item())
    assert reward == pytest.approx(game.rewards[3].item())
