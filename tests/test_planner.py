"Plans: what they name is what is predicted, and a larger budget never needs more levers."
import pytest

from trainkit.model import ModelConfig
from trainkit.planner import Setup, plan_memory, predict_setup

TINY = ModelConfig(vocab_size=300, d_model=64, n_heads=2, n_layers=1, d_ff=128, max_seq_len=128)


def test_plans_are_predictions_and_larger_budgets_need_no_more_levers():
    start = Setup(6, 64)
    need = predict_setup(TINY, start).peak
    before = 0
    for share in (1, 0.6, 0.3):
        plan = plan_memory(TINY, share*need, start)
        assert plan.fits and plan.peak <= share*need and plan.peak == predict_setup(TINY, plan.setup).peak
        assert plan.setup.batch_size*plan.setup.accumulation == 6 and len(plan.levers) >= before
        before = len(plan.levers)
    assert before > 0


def test_a_budget_too_small_says_the_smallest_need():
    plan = plan_memory(TINY, '1 kB', Setup(1, 64), levers=['chunked loss'])
    assert not plan.fits and 'the smallest need is' in str(plan)
    assert plan.peak == min(size for _, size in plan.waterfall)
    with pytest.raises(ValueError, match="no lever 'lora'"): plan_memory(TINY, 1, levers=['lora'])
