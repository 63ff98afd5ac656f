"What the panel shows of a run: its size, its stages, its end, and the run of an earlier kernel."

import pytest
import torch


def test_a_packed_model_has_as_many_parameters_as_before():
    "Plan, report, monitor and `num_parameters` count the numbers, not the bytes they lie in."
    from trainkit.lora.inject import trainable_report
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer, count_logical_parameters
    from trainkit.quant.quantize import QuantConfig, quantize_model

    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=64, d_model=64, n_heads=2, n_layers=2, d_ff=128, bias="qkv")
    )
    before = model.num_parameters()
    quantize_model(model, QuantConfig(bits=4))
    assert sum(p.numel() for p in model.parameters()) < before
    assert model.num_parameters() == count_logical_parameters(model) == before
    assert trainable_report(model).total == before
