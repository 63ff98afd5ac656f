"Preference tuning against TRL: each loss, whole runs, references, shared prompts, metrics."

import copy
import math
import warnings
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from trainkit.align.dpo import DIVERGENCES, LOSSES, USED_BY, Converged, DPOConfig, Pair
from trainkit.align.dpo import _desensitize, _dpo_metrics, _other_answers, dpo_objective, exact_kl
from trainkit.align.dpo import preference_loss, reward_metrics
from trainkit.config import ConfigError
from trainkit.align import logprobs
from trainkit.align.logprobs import pair_log_probs, shares_prompts
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.inject import add_lora
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig
from trainkit.align.preference_data import SIDES, PairBatches, collate_pairs, tokenize_pairs
from trainkit.align.reference import (
    AdapterDisabledReference,
    Reference,
    make_reference,
    precompute_reference,
)
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.chat import set_template
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer
from trainkit.align.kto import UnpairedBatches, collate_unpaired, kto_objective
from trainkit.align.kto import tokenize_unpaired

warnings.filterwarnings("ignore")
RNG = torch.Generator().manual_seed(0)
BOTH, BEFORE = (-6 * torch.rand(16, generator=RNG) - 0.5 for _ in range(2))
LENGTHS = torch.randint(2, 9, (16,), generator=RNG)


def some_pairs(n, seed=0):
    rng = np.random.default_rng(seed)

    def draw(low, high):
        return rng.integers(3, 96, int(rng.integers(low, high))).tolist()

    pairs = [dict(prompt=draw(3, 14), chosen=draw(2, 9), rejected=draw(2, 9)) for _ in range(n)]
    return [{**p, "length": sum(map(len, p.values()))} for p in pairs]


def tiny_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def ours(**knobs):
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            **dict(
                vocab_size=96,
                d_model=32,
                n_heads=4,
                n_kv_heads=2,
                n_layers=2,
                d_ff=64,
                max_seq_len=64,
            )
            | knobs
        )
    )


def spread(both, lengths):
    "Log-probabilities (2B, T - 1) with some outliers, and the mask of the answers (2B, T)."
    T = int(lengths.max()) + 1
    mask = (torch.arange(T) >= 1) & (torch.arange(T) <= lengths[:, None])
    share = (
        torch.rand(len(both), T - 1, generator=torch.Generator().manual_seed(1), dtype=both.dtype)
        * mask[:, 1:]
    )
    return share / share.sum(1, keepdim=True) * both[:, None], mask


def theirs(config, **more):
    "TRL's loss for the same log-probabilities."
    import trl

    log_probs, mask = spread(BOTH, LENGTHS)
    zero, same, B = torch.zeros_like(log_probs), lambda x: x, len(BOTH) // 2
    out = SimpleNamespace(
        log_probs=log_probs,
        entropy=zero,
        mean_logits=zero,
        is_top1=zero.bool(),
        log_sum_sq_probs=zero,
    )
    me = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        aux_loss_enabled=False,
        ld_alpha=config.ld_alpha,
        precompute_ref_logps=True,
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        loss_types=config.loss_type,
        loss_weights=config.loss_weights or [1.0] * len(config.loss_type),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        args=SimpleNamespace(discopop_tau=config.discopop_tau),
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = dict(
        input_ids=mask.long(),
        attention_mask=mask.long(),
        completion_mask=mask.long(),
        ref_chosen_logps=BEFORE[:B],
        ref_rejected_logps=BEFORE[B:],
    )
    return trl.DPOTrainer._compute_loss(me, lambda **_: out, inputs, False).item()


def mine(config):
    return (
        preference_loss(
            BOTH[:8], BOTH[8:], BEFORE[:8], BEFORE[8:], config, LENGTHS[:8], LENGTHS[8:]
        )
        .mean()
        .item()
    )


TRL_LOSSES = (
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)


def test_every_loss_is_trls():
    pytest.importorskip("trl")
    for beta in (0.1, 0.5):
        for name in TRL_LOSSES:
            config = DPOConfig(
                loss_type=[name],
                label_smoothing=0.1 * (name in USED_BY["label_smoothing"]),
                beta=beta,
            )
            assert mine(config) == pytest.approx(theirs(config), rel=1e-6, abs=1e-6), name
        assert mine(DPOConfig(beta=beta)) == pytest.approx(theirs(DPOConfig(beta=beta)), abs=1e-6)
    several = DPOConfig(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    assert mine(several) == pytest.approx(theirs(several), abs=1e-6)
    for kind in ("forward_kl", "js_divergence", "alpha_divergence"):
        for name in sorted(USED_BY["f_divergence_type"]):
            config = DPOConfig(
                loss_type=[name], f_divergence_type=kind, label_smoothing=0.1 * (name == "exo_pair")
            )
            assert mine(config) == pytest.approx(theirs(config), rel=1e-6, abs=1e-6), (kind, name)
    assert mine(
        DPOConfig(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0)
    ) == pytest.approx(mine(DPOConfig()), abs=1e-6)


OTHER_VALUES = dict(
    label_smoothing=0.2,
    f_divergence_type="js_divergence",
    discopop_tau=0.5,
    simpo_gamma=1.5,
    sft_weight=0.5,
    desirable_weight=2.0,
    undesirable_weight=2.0,
)


def changed(config, **knobs):
    "A config with knobs that its check may refuse."
    other = DPOConfig(loss_type=list(config.loss_type), label_smoothing=config.label_smoothing)
    for name, value in knobs.items():
        setattr(other, name, value)
    return other


@pytest.mark.parametrize("loss", LOSSES)
def test_a_knob_changes_the_loss_or_is_refused(loss):
    "Both ways round: what is accepted has an effect on the numbers, and what is refused has none."
    plain = DPOConfig(loss_type=[loss], label_smoothing=0.1 * (loss == "exo_pair"))

    def value(config):
        return preference_loss(
            BOTH[:8], BOTH[8:], BEFORE[:8], BEFORE[8:], config, LENGTHS[:8], LENGTHS[8:], 0.3
        )

    for name, other in OTHER_VALUES.items():
        if name.endswith("desirable_weight") and loss in ("apo_zero", "bco_pair"):
            continue  # Rows with a label each have it: see the next test
        moved = not torch.equal(value(changed(plain, **{name: other})), value(plain))
        assert moved == (loss in USED_BY[name]), name
        if moved:
            DPOConfig(
                **{"loss_type": [loss], "label_smoothing": plain.label_smoothing, name: other}
            )
        else:
            with pytest.raises(ConfigError, match=f"{name}.*has no effect"):
                DPOConfig(
                    **{"loss_type": [loss], "label_smoothing": plain.label_smoothing, name: other}
                )


def test_options_without_effect_are_refused():
    for bad, words in (
        (dict(f_alpha_divergence_coef=0.7), "f_alpha_divergence_coef.*only alpha_divergence"),
        (
            dict(loss_type=["sigmoid", "bco_pair"], f_divergence_type="js_divergence"),
            "no effect on bco_pair",
        ),
        (dict(loss_type=["sft"], f_divergence_type="js_divergence"), "no effect on sft"),
        (dict(loss_type=["orpo", "sft"], sft_weight=0.5), "loss_weights"),
        (dict(loss_type=["sft"], ld_alpha=0.5), "ld_alpha"),
        (dict(loss_type=["simpo"], exact_kl=True), "asks no reference"),
        (dict(reference_free=True, reference="copy"), "reference_free = True"),
        (dict(loss_type=["orpo"], precompute_ref_log_probs=True), "asks no reference"),
    ):
        with pytest.raises(ConfigError, match=words):
            DPOConfig(**bad)
    assert (
        DPOConfig(loss_type=["sigmoid", "sft"], f_divergence_type="js_divergence").f_divergence_type
        == "js_divergence"
    )  # As in TRL
    assert (
        DPOConfig(loss_type=["sigmoid", "hinge"], label_smoothing=0.1).label_smoothing == 0.1
    )  # One of them reads it
    model = ours()
    for loss in ("apo_zero", "bco_pair"):
        weighed = DPOConfig(loss_type=[loss], desirable_weight=2.0)
        assert kto_objective(make_reference(model), weighed)
        with pytest.raises(ValueError, match="desirable_weight.*label each"):
            dpo_objective(make_reference(model), weighed)
    for bad in (dict(ld_alpha=0.5), dict(exact_kl=True), dict(reference_free=True)):
        with pytest.raises(ValueError, match=f"dpo.{[*bad][0]}.*no effect"):
            kto_objective(make_reference(model), DPOConfig(loss_type=["kto"], **bad))


def test_losses_without_a_reference_are_trls():
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    chosen, rejected = BOTH[:8], BOTH[8:]
    here = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=0.3,
        alpha=0.0,
        simpo_gamma=0.7,
        label_smoothing=0.1,
    )
    for name in ("sigmoid", "simpo"):
        here.loss_type = name
        more = dict(sft_weight=0.0) if name == "sigmoid" else dict(simpo_gamma=0.7)
        config = DPOConfig(
            loss_type=["cpo" if name == "sigmoid" else name], beta=0.3, label_smoothing=0.1, **more
        )
        assert torch.allclose(
            preference_loss(chosen, rejected, config=config),
            cpo.cpo_loss(here, chosen, rejected)[0],
            atol=1e-6,
        ), name
    their = orpo.odds_ratio_loss(here, chosen.float(), rejected.float())[
        0
    ]  # What is subtracted from the SFT loss
    config = DPOConfig(loss_type=["orpo"], beta=0.3, sft_weight=0.0)
    assert torch.allclose(
        preference_loss(chosen.float(), rejected.float(), config=config), -their, atol=1e-6
    )


def test_kto_is_the_papers():
    kl, config = 0.7, DPOConfig(loss_type=["kto"], beta=0.2, desirable_weight=1.5)
    loss = preference_loss(BOTH[:8], BOTH[8:], BEFORE[:8], BEFORE[8:], config, kl=kl).mean()
    good, bad = BOTH[:8] - BEFORE[:8], BOTH[8:] - BEFORE[8:]
    losses = torch.cat(
        (1.5 * (1 - torch.sigmoid(0.2 * (good - kl))), 1 - torch.sigmoid(0.2 * (kl - bad)))
    )  # trl.KTOTrainer._compute_loss, eq. 7
    assert loss.item() == pytest.approx(losses.mean().item(), abs=1e-6)


def test_literal_values():
    a, b = torch.tensor([-3.25, -80.0]), torch.tensor([-1.5, -2.0])
    assert (preference_loss(a, b, a, b) == math.log(2)).all()
    logits = torch.tensor([0.0, 10.0, 20.0])
    assert torch.allclose(
        preference_loss(logits, 0 * logits, 0 * logits, 0 * logits),
        torch.tensor([0.69314718, 0.31326169, 0.12692801]),
        atol=1e-6,
    )
    free = preference_loss(a, b, a, b, DPOConfig(reference_free=True))
    assert torch.allclose(free, -F.logsigmoid(0.1 * (a - b)))


@pytest.mark.parametrize(
    "loss, more", [(["sigmoid"], {}), (["ipo", "sft"], {}), (["sigmoid"], dict(ld_alpha=0.3))]
)
def test_a_run_is_trls_run_step_by_step(tmp_path, loss, more):
    "Same pairs in the same order, fp32 on a CPU: the losses, the margins and the weights agree."
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pairs, model = some_pairs(12), tiny_llama()
    copied, B, steps = copy.deepcopy(model), 3, 4
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )
    rows = [
        dict(
            prompt="",
            chosen="",
            rejected="",
            **{f"{k}_ids": p[k] for k in ("prompt", "chosen", "rejected")},
        )
        for p in pairs
    ]

    class Ready(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset

        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = trl.DPOConfig(
        str(tmp_path),
        loss_type=loss,
        per_device_train_batch_size=B,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        beta=0.3,
        disable_dropout=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    their = Ready(
        copied,
        copy.deepcopy(model),
        args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    their.train()
    logs = [r for r in their.state.log_history if "loss" in r]
    optim = OptimConfig(
        learning_rate=1e-2,
        weight_decay=0.0,
        adam_beta2=0.999,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    objective = dpo_objective(make_reference(model), DPOConfig(loss_type=loss, beta=0.3, **more))
    result = Trainer(
        model,
        objective,
        PairBatches(pairs, B, shuffle=False),
        config=TrainConfig(max_steps=steps, logging_steps=1, progress=False),
        optim=optim,
    ).train()
    assert len(logs) == len(result.history) == steps
    for a, b in zip(logs, result.history, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "rewards/margins",
            "rewards/chosen",
            "logps/chosen",
            "logps/rejected",
        )[: None if not more else 4]:  # TRL weighs those too
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=2e-5), (name, b["step"])

    def flat(net):
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    start = flat(tiny_llama())
    # Adam divides a gradient by its own size, so weights may differ where it is only rounding
    assert (flat(model) - flat(their.model)).norm() < 1e-3 * (flat(model) - start).norm()


@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
def test_kto_without_pairs_is_trls_run_step_by_step(tmp_path, loss):
    "Rows with a label, liked and not in no order: losses, KL, rewards and weights agree."
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rng, model = np.random.default_rng(2), tiny_llama()
    copied, B, steps, rows = copy.deepcopy(model), 4, 4, []
    for _ in range(16):
        prompt, answer = (rng.integers(3, 96, int(rng.integers(2, 9))) for _ in range(2))
        rows.append(
            dict(
                prompt=prompt,
                completion=answer,
                labels=answer,
                label=bool(rng.random() < 0.4),
                length=len(prompt) + len(answer),
            )
        )
    theirs, answers = [], [r["completion"].tolist() for r in rows]
    for i, r in enumerate(
        rows
    ):  # Within each batch the answer of the row before, as `KTOTrainer` makes them
        other = answers[i - 1 if i % B else i + B - 1]
        theirs.append(
            dict(
                prompt="",
                completion="",
                prompt_ids=r["prompt"].tolist(),
                completion_ids=answers[i],
                label=r["label"],
                **(dict(KL_completion_ids=other) if loss == "kto" else {}),
            )
        )
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )

    class Ready(trl.KTOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset

        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = trl.KTOConfig(
        str(tmp_path),
        loss_type="kto" if loss == "kto" else "apo_zero_unpaired",
        per_device_train_batch_size=B,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        beta=0.3,
        desirable_weight=1.5,
        disable_dropout=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    their = Ready(
        copied,
        copy.deepcopy(model),
        args,
        train_dataset=datasets.Dataset.from_list(theirs),
        processing_class=tokenizer,
    )
    their.train()
    logs = [r for r in their.state.log_history if "loss" in r]
    optim = OptimConfig(
        learning_rate=1e-2,
        weight_decay=0.0,
        adam_beta2=0.999,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    goal = kto_objective(
        make_reference(model), DPOConfig(loss_type=[loss], beta=0.3, desirable_weight=1.5)
    )
    result = Trainer(
        model,
        goal,
        UnpairedBatches(rows, B, shuffle=False),
        config=TrainConfig(max_steps=steps, logging_steps=1, progress=False),
        optim=optim,
    ).train()
    assert len(logs) == len(result.history) == steps
    for a, b in zip(logs, result.history, strict=True):
        for name in {
            "loss",
            "grad_norm",
            "kl",
            "rewards/chosen",
            "rewards/rejected",
            "logps/chosen",
            "logps/rejected",
        } & a.keys():
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=2e-5), (name, b["step"])
    assert {"loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected"} <= set().union(
        *logs
    ) and (loss != "kto" or max(a["kl"] for a in logs) > 0.01)

    def flat(net):
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert (flat(model) - flat(their.model)).norm() < 1e-3 * (
        flat(model) - flat(tiny_llama())
    ).norm()


@pytest.mark.parametrize("make", [ours, tiny_llama])
def test_sharing_a_prompt_changes_nothing(make):
    model, pairs = make(), some_pairs(6)
    assert shares_prompts(model)
    results = {}
    for share in (True, False):
        model.zero_grad()
        objective = dpo_objective(
            Reference(make()), DPOConfig(share_prompts=share, loss_type=["sigmoid", "sft"])
        )
        loss = objective(model, collate_pairs(pairs)).total
        loss.backward()
        results[share] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
    assert results[True][0] == pytest.approx(results[False][0], abs=1e-5)
    assert torch.allclose(results[True][1], results[False][1], atol=1e-5)


def test_models_that_cannot_share_are_read_plainly():
    assert not shares_prompts(ours(layer_windows=[4, 0]))
    mistral = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=4,
        )
    )
    assert not shares_prompts(mistral)

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ours()

        def forward(self, input_ids):
            return self.inner(input_ids).logits

    model = Bare()
    assert not shares_prompts(model)
    plain, same = (
        pair_log_probs(model, collate_pairs(some_pairs(4)), False),
        pair_log_probs(model.inner, collate_pairs(some_pairs(4))),
    )
    assert torch.allclose(plain.chosen, same.chosen, atol=1e-4)


@pytest.mark.parametrize("make", [ours, tiny_llama])
def test_adapter_is_its_own_reference(make):
    "With the adapter off a run sees the numbers of a copy of the base; also with PEFT's model."
    pairs, base = some_pairs(8), make()
    model = add_lora(make(), LoRAConfig(r=4, lora_alpha=8))
    reference = make_reference(model)
    assert type(reference) is AdapterDisabledReference
    config = TrainConfig(max_steps=4, logging_steps=1, progress=False)
    result = Trainer(
        model,
        dpo_objective(reference),
        PairBatches(pairs, 4, shuffle=False),
        config=config,
        optim=OptimConfig(learning_rate=1e-2),
    ).train()
    assert (
        result.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        and result.history[-1]["loss"] < 0.6925
    )
    batch = collate_pairs(pairs)
    assert torch.allclose(
        reference(model, batch).chosen, Reference(base)(base, batch).chosen, atol=1e-4
    )


def test_peft_models_work():
    peft, pairs = pytest.importorskip("peft"), some_pairs(4)
    model = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    reference, batch = make_reference(model), collate_pairs(pairs)
    assert type(reference) is AdapterDisabledReference and shares_prompts(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.1)
    assert torch.allclose(
        reference(model, batch).chosen, Reference(tiny_llama())(model, batch).chosen, atol=1e-4
    )
    assert dpo_objective(reference)(model, batch).total.item() != pytest.approx(
        math.log(2), abs=1e-4
    )


def test_written_reference_gives_the_same_run(tmp_path):
    pairs, runs = some_pairs(8), []
    for write in (False, True):
        model, rows = ours(), [dict(p) for p in pairs]
        reference = (
            precompute_reference(model, rows, tmp_path / "ref.npz")
            if write
            else make_reference(model)
        )
        runs.append(
            Trainer(
                model,
                dpo_objective(reference),
                PairBatches(rows, 4, seed=3),
                config=TrainConfig(max_steps=4, logging_steps=1, progress=False),
                optim=OptimConfig(learning_rate=1e-2),
            ).train()
        )
    for a, b in zip(runs[0].history, runs[1].history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    with pytest.raises(ValueError, match="made of another model"):
        precompute_reference(ours(d_ff=65), rows, tmp_path / "ref.npz")


@pytest.mark.parametrize("mixed", ["bf16", "fp16"])
def test_written_reference_is_rounded_as_training_is(mixed, tmp_path):
    "The first step of a model that has not moved: no reward, and the loss is log 2."
    from trainkit.train.step import make_accelerator

    torch.manual_seed(0)
    model, rows = ours(init_std=0.3), some_pairs(4)
    accelerator = make_accelerator(mixed, model)
    there = tmp_path / "ref.npz"
    done = Trainer(
        model,
        dpo_objective(precompute_reference(model, rows, there, accelerator=accelerator)),
        PairBatches(rows, 4),
        config=TrainConfig(max_steps=1, logging_steps=1, progress=False),
        optim=OptimConfig(learning_rate=0.0, weight_decay=0.0),
        accelerator=accelerator,
    ).train()
    assert done.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert done.history[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="made of another model"):
        precompute_reference(ours(init_std=0.3), rows, there)


def test_accumulation_is_the_whole_batch_and_coupled_losses_refuse():
    pairs, grads = some_pairs(8), []
    for size, accumulate in ((8, 1), (2, 4)):
        model = ours()
        config = TrainConfig(
            max_steps=1, gradient_accumulation_steps=accumulate, progress=False, logging_steps=1
        )
        objective = dpo_objective(
            Reference(ours(rope_theta=5000.0)), DPOConfig(loss_type=["sigmoid", "sft"])
        )
        result = Trainer(
            model,
            objective,
            PairBatches(pairs, size, shuffle=False),
            config=config,
            optim=OptimConfig(learning_rate=1e-2),
        ).train()
        grads.append((result.history[0]["loss"], result.history[0]["rewards/margins"]))
    assert grads[0] == pytest.approx(grads[1], abs=1e-5)
    with pytest.raises(Exception, match="couple|depend|accumul"):
        Trainer(
            model,
            dpo_objective(make_reference(model), DPOConfig(loss_type=["aot"])),
            PairBatches(pairs, 2),
            config=config,
        ).train()


def test_rows_become_pairs_as_trl_makes_them():
    "Text without a chat template: the same prompt and answers, EOS included."
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    rows = [
        dict(
            prompt=f"What is {i} and {i}?",
            chosen=f" It is {2 * i}.",
            rejected=f" It is {2 * i + 1}.",
        )
        for i in range(40)
    ]
    tokenizer = BPETokenizer.train(
        [t for r in rows for t in r.values()], 300, special_tokens=["<|endoftext|>"]
    )
    for pair, row in zip(tokenize_pairs(rows, tokenizer), rows, strict=True):
        assert (
            tokenizer.decode([*pair["prompt"], *pair["chosen"]])
            == row["prompt"] + row["chosen"] + "<|endoftext|>"
        )
        assert (np.asarray(pair["rejected_labels"]) != -100).all()
        tokens = pair["prompt"], pair["chosen"], pair["rejected"]
        assert pair["length"] == sum(map(len, tokens))  # By which batches are grouped


def test_a_pair_of_unequal_answers_is_not_reported_as_cut():
    letters = BPETokenizer.train(["abc"], 257, special_tokens=["<|end|>"], progress=False)
    row = dict(prompt="abc", chosen="d" * 20, rejected="e")
    report = tokenize_pairs([row], letters, 40, None, "prompt").report
    assert (report.answers_cut, report.prompts_cut, report.dropped) == (0, 0, 0)


def test_pairs_that_are_the_same_once_they_are_cut_are_left_out():
    letters = BPETokenizer.train(["abc"], 257, special_tokens=["<|end|>"], progress=False)
    letters.eos_token = "<|end|>"
    rows = [
        dict(prompt="abc", chosen="d" * 20 + "x", rejected="d" * 20 + "y"),
        dict(prompt="abc", chosen="de", rejected="fg"),
    ]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pairs = tokenize_pairs(rows, letters, 12, None, "prompt")
    assert pairs.numbers == [1] and (
        pairs.report.same,
        pairs.report.dropped,
        pairs.report.answers_cut,
    ) == (1, 1, 0)
    assert "1 were left out because both answers are the same" in str(heard[0].message)
    assert (
        len(tokenize_pairs(rows, letters, 12 + 13, None, "prompt")) == 2
    )  # Where the difference is read


ROW = dict(prompt="abcdefgh", chosen="ijkl", rejected="mn", completion="ijkl", label=True)


@pytest.mark.parametrize("tokenize", [tokenize_pairs, tokenize_unpaired])
@pytest.mark.parametrize(
    "limits, kept, named",
    [
        (dict(), (8, 5), ""),
        (dict(max_length=13, max_prompt_length=8), (8, 5), ""),
        (dict(max_length=12), (7, 5), "raise dpo.max_length"),
        (dict(max_length=5), (1, 4), "raise dpo.max_length"),
        (dict(max_prompt_length=7), (7, 5), "raise dpo.max_prompt_length"),
        (dict(max_length=12, max_prompt_length=3), (3, 5), "raise dpo.max_prompt_length"),
    ],
)
def test_nothing_is_cut_where_a_long_row_is_an_error(tokenize, limits, kept, named):
    "truncation='error' raises for a prompt, too; 'prompt' cuts the same row and says so."
    letters = BPETokenizer.train(["abc"], 257, special_tokens=["<|end|>"], progress=False)
    letters.eos_token = "<|end|>"
    if named:
        with pytest.raises(ValueError, match=f"row 0 .*{named}.*dpo.truncation='prompt'"):
            tokenize([ROW], letters, truncation="error", **limits)
        with pytest.raises(ValueError, match="row 0 "):
            tokenize([ROW], letters, **limits)
        with pytest.warns(UserWarning, match="lost their"):
            row = tokenize([ROW], letters, truncation="prompt", **limits)[0]
    else:
        row = tokenize([ROW], letters, truncation="error", **limits)[0]
    assert (len(row["prompt"]), len(row["chosen" if "chosen" in row else "completion"])) == kept


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_rewards_are_those_that_the_loss_compares(loss):
    "As in TRL's CPO and ORPO trainers: means over tokens if the loss takes means, else sums."
    model, batch = (
        ours(),
        collate_pairs(
            [
                dict(prompt=[5, 6], chosen=[7, 1], rejected=[9, 9, 9, 9, 8, 1]),
                dict(prompt=[5, 6], chosen=[7, 8, 11, 12, 1], rejected=[9, 1]),
            ]
        ),
    )
    log_probs = pair_log_probs(model, batch, False)
    per = (lambda x, n: x / n) if loss != "cpo" else (lambda x, n: x)
    chosen, rejected = (
        0.1 * per(log_probs.chosen, log_probs.chosen_tokens),
        0.1 * per(log_probs.rejected, log_probs.rejected_tokens),
    )
    metrics = {
        k: float(v) / int(n)
        for k, (v, n) in dpo_objective(None, DPOConfig(loss_type=[loss]))(
            model, batch
        ).metrics.items()
    }
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4) and metrics[
        "rewards/rejected"
    ] == pytest.approx(rejected.mean().item(), rel=1e-4)
    assert metrics["rewards/accuracies"] == (chosen > rejected).float().mean().item()


def test_written_numbers_of_one_adapter_are_not_anothers(tmp_path):
    def tuned(seed):
        model = add_lora(ours(), LoRAConfig(r=2))
        for name, p in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(seed))
        return model

    pairs = some_pairs(6)
    precompute_reference(tuned(0), pairs, tmp_path / "a.npz")
    precompute_reference(tuned(0), pairs, tmp_path / "a.npz")  # The same again
    for other in (tuned(1), ours(), add_lora(ours(), LoRAConfig(r=2))):
        with pytest.raises(ValueError, match="made of another model"):
            precompute_reference(other, pairs, tmp_path / "a.npz")
    precompute_reference(
        add_lora(ours(), LoRAConfig(r=2)), pairs, tmp_path / "b.npz"
    )  # One that is nothing yet
    for same in (add_lora(ours(), LoRAConfig(r=4)), ours()):
        precompute_reference(same, pairs, tmp_path / "b.npz")
    precompute_reference(tuned(0), pairs, tmp_path / "b.npz", AdapterDisabledReference())


def test_losses_of_policy_and_reference_are_logged_apart():
    """Logged next to the loss: the cross-entropy of model and reference on the chosen answers.

    It agrees with the log-probabilities of transformers.
    """
    model, before = ours(), ours()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    pairs = some_pairs(5)
    sums = dpo_objective(Reference(before), DPOConfig(share_prompts=False))(
        model, collate_pairs(pairs)
    ).metrics
    means = {k: float(v) / int(n) for k, (v, n) in sums.items()}
    for name, net in (("policy", model), ("reference", before)):
        nats, tokens = {"chosen": 0.0, "rejected": 0.0}, 0
        for pair in pairs:
            for side in nats:
                ids = torch.tensor([pair["prompt"] + pair[side]])
                logits = net(ids).logits[0, len(pair["prompt"]) - 1 : -1]
                nats[side] += F.cross_entropy(
                    logits, ids[0, len(pair["prompt"]) :], reduction="sum"
                ).item()
            tokens += len(pair["chosen"])
        assert means[f"loss/{name}"] == pytest.approx(nats["chosen"] / tokens, rel=1e-5)
        for side, total in nats.items():
            assert means[f"logps/{'ref_' * (name == 'reference')}{side}"] == pytest.approx(
                -total / 5, rel=1e-5
            )
    assert means["loss/policy"] != means["loss/reference"]
    assert (
        "loss/reference"
        not in dpo_objective(None, DPOConfig(loss_type="simpo"))(
            model, collate_pairs(pairs)
        ).metrics
    )


@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "hinge", "ipo"])
def test_cpo_of_trl_is_the_same_number_here(loss):
    "What the converter makes of CPOConfig is what TRL's CPOTrainer computes."
    import os
    import types

    pytest.importorskip("trl")
    from trainkit.recipes.foreign_settings import look_up

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOTrainer

    model = tiny_llama()
    pairs = some_pairs(4)
    rows = [
        [*map(int, p["prompt"]), *map(int, p[s])] for s in ("chosen", "rejected") for p in pairs
    ]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for i, (row, pair) in enumerate(zip(rows, [*pairs, *pairs], strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
        labels[i, len(pair["prompt"]) : len(row)] = ids[i, len(pair["prompt"]) : len(row)]
    batch = dict(
        concatenated_input_ids=ids,
        concatenated_attention_mask=mask,
        concatenated_labels=labels,
        chosen_labels=labels[: len(pairs)],
    )
    trainer = types.SimpleNamespace(
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        label_pad_token_id=-100,
        aux_loss_enabled=False,
        accelerator=types.SimpleNamespace(device="cpu"),
        label_smoothing=0.0,
        alpha=0.0,
        beta=0.1,
        loss_type=loss,
        cpo_alpha=0.5,
        simpo_gamma=0.5,
        concatenated_inputs=lambda *_, **__: batch,
        get_batch_logps=CPOTrainer.get_batch_logps,
    )
    chosen, rejected, _, _, nll = CPOTrainer.concatenated_forward(trainer, model, batch)[:5]
    theirs = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean() + 0.5 * nll
    words = {"loss_type": loss, "cpo_alpha": 0.5}
    knobs = {}
    for word, value in words.items():
        meaning = look_up(word, value, ("CPOConfig",), words)
        knobs |= meaning if isinstance(meaning, dict) else {}
    settings = {name.removeprefix("dpo."): value for name, value in knobs.items()}
    settings["loss_type"] = [settings["loss_type"]] * isinstance(settings["loss_type"], str) or (
        settings["loss_type"]
    )
    ours = dpo_objective(None, DPOConfig(beta=0.1, **settings))(model, collate_pairs(pairs))
    assert float(ours.total) == pytest.approx(float(theirs), rel=1e-5)


# --- the formulas in plain arithmetic, also for answers of a single token


def logsig(x):
    return -math.log1p(math.exp(-x))


def sig(x):
    return 1 / (1 + math.exp(-x))


def smooth(h, e):
    return -(1 - e) * logsig(h) - e * logsig(-h)


def log_odds(x):
    return x - math.log(1 - math.exp(x))


FORMULAS = {  # (chosen, rejected, their ratios, their tokens, the config) -> loss
    "sigmoid": lambda c, r, cr, rr, n, m, k: smooth(k.beta * (cr - rr), k.label_smoothing),
    "hinge": lambda c, r, cr, rr, n, m, k: max(0, 1 - k.beta * (cr - rr)),
    "ipo": lambda c, r, cr, rr, n, m, k: (cr / n - rr / m - 1 / (2 * k.beta)) ** 2,
    "robust": lambda c, r, cr, rr, n, m, k: (
        (
            -(1 - k.label_smoothing) * logsig(k.beta * (cr - rr))
            + k.label_smoothing * logsig(-k.beta * (cr - rr))
        )
        / (1 - 2 * k.label_smoothing)
    ),
    "exo_pair": lambda c, r, cr, rr, n, m, k: sum(
        sig(h) * (logsig(h) - math.log(share))
        for h, share in (
            (k.beta * (cr - rr), 1 - k.label_smoothing),
            (-k.beta * (cr - rr), k.label_smoothing),
        )
    ),
    "nca_pair": lambda c, r, cr, rr, n, m, k: (
        -logsig(k.beta * cr) - logsig(-k.beta * cr) / 2 - logsig(-k.beta * rr) / 2
    ),
    "bco_pair": lambda c, r, cr, rr, n, m, k: -logsig(k.beta * cr) - logsig(-k.beta * rr),
    "sppo_hard": lambda c, r, cr, rr, n, m, k: (cr - 0.5 / k.beta) ** 2 + (rr + 0.5 / k.beta) ** 2,
    "apo_zero": lambda c, r, cr, rr, n, m, k: 1 - sig(k.beta * cr) + sig(k.beta * rr),
    "apo_down": lambda c, r, cr, rr, n, m, k: sig(k.beta * cr) + 1 - sig(k.beta * (cr - rr)),
    "discopop": lambda c, r, cr, rr, n, m, k: (
        -logsig(k.beta * (cr - rr)) * (1 - sig(k.beta * (cr - rr) / k.discopop_tau))
        + math.exp(-k.beta * (cr - rr)) * sig(k.beta * (cr - rr) / k.discopop_tau)
    ),
    "sigmoid_norm": lambda c, r, cr, rr, n, m, k: -logsig(k.beta * (cr / n - rr / m)),
    "kto": lambda c, r, cr, rr, n, m, k: (
        (
            k.desirable_weight * (1 - sig(k.beta * (cr - 0.4)))
            + k.undesirable_weight * (1 - sig(k.beta * (0.4 - rr)))
        )
        / 2
    ),
    "orpo": lambda c, r, cr, rr, n, m, k: -k.beta * logsig(log_odds(c / n) - log_odds(r / m)),
    "simpo": lambda c, r, cr, rr, n, m, k: smooth(
        k.beta * (c / n - r / m) - k.simpo_gamma, k.label_smoothing
    ),
    "cpo": lambda c, r, cr, rr, n, m, k: smooth(k.beta * (c - r), k.label_smoothing),
    "sft": lambda c, r, cr, rr, n, m, k: -c * 4 / 14,
    "aot": lambda c, r, cr, rr, n, m, k: None,
    "aot_unpaired": lambda c, r, cr, rr, n, m, k: None,
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_by_hand(name):
    assert {*FORMULAS} == {*LOSSES}
    chosen, rejected = [-1.0, -4.5, -0.3, -2.0], [-2.0, -0.4, -3.0, -6.0]
    before, behind = [-1.5, -3.0, -0.9, -2.0], [-1.7, -1.0, -2.0, -4.5]
    n, m = [1, 4, 2, 7], [3, 1, 5, 2]
    config = SimpleNamespace(
        beta=0.3,
        label_smoothing=0.2,
        f_divergence_type="reverse_kl",
        discopop_tau=0.4,
        desirable_weight=1.5,
        undesirable_weight=0.7,
        simpo_gamma=0.25,
    )
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, before, behind))
    pair = Pair(config, *tensors, torch.tensor(n), torch.tensor(m), 0.4)
    found = LOSSES[name](pair, config).tolist()
    columns = zip(chosen, rejected, before, behind, n, m, strict=True)
    wanted = [FORMULAS[name](c, r, c - x, r - y, a, b, config) for c, r, x, y, a, b in columns]
    if name == "aot":
        ours = sorted(c - r for c, r in zip(chosen, rejected, strict=True))
        theirs = sorted(c - r for c, r in zip(before, behind, strict=True))
        wanted = [smooth(0.3 * (a - b), 0.2) for a, b in zip(ours, theirs, strict=True)]
    if name == "aot_unpaired":
        ours = sorted(c - x for c, x in zip(chosen, before, strict=True))
        theirs = sorted(r - y for r, y in zip(rejected, behind, strict=True))
        wanted = [smooth(0.3 * (a - b), 0.2) for a, b in zip(ours, theirs, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("t", [-3.0, -0.2, 0.0, 0.7, 100.0])
def test_scores_of_divergences_by_hand(t):
    wanted = dict(reverse_kl=t, forward_kl=1 - math.exp(-t))
    wanted["js_divergence"] = math.log(2 / (1 + math.exp(-t)))
    for name, score in wanted.items():
        found = DIVERGENCES[name](torch.tensor(t, dtype=torch.float64), None)
        assert float(found) == pytest.approx(score, rel=1e-9)
    for power in (0.5, 1 + 1e-7, 1 + 1e-5, 2.0):
        config = SimpleNamespace(f_alpha_divergence_coef=power)
        found = DIVERGENCES["alpha_divergence"](torch.tensor(t, dtype=torch.float64), config)
        a = power - 1
        score = t if a < 1e-6 and a > 0 else (math.exp(min(a * t, 80)) - 1) / a
        assert float(found) == pytest.approx(score, rel=1e-9)


def test_tokens_that_only_the_longer_answer_has_count_less():
    both = SimpleNamespace(
        chosen=torch.tensor([-5.0, -1.0]),
        rejected=torch.tensor([-2.0, -7.0]),
        chosen_shared=torch.tensor([-3.0, -1.0]),
        rejected_shared=torch.tensor([-2.0, -4.0]),
    )
    plain = _desensitize(both, SimpleNamespace(ld_alpha=None))
    assert [x.tolist() for x in plain] == [[-5, -1], [-2, -7]]
    less = _desensitize(both, SimpleNamespace(ld_alpha=0.25))
    assert [x.tolist() for x in less] == [[-3.5, -1], [-2, -4.75]]


def test_metrics_of_pairs_by_hand():
    chosen, rejected = torch.tensor([1.0, 2, 3, 0]), torch.tensor([0.0, 2, 4, -1])
    found = reward_metrics(chosen, rejected)
    assert {name.split("/")[1]: (float(s), n) for name, (s, n) in found.items()} == dict(
        chosen=(6, 4), rejected=(5, 4), margins=(1, 4), accuracies=(2.5, 4), ties=(1, 4)
    )
    torch.manual_seed(0)
    p, q = torch.randn(2, 5, 11)
    kl = F.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="none", log_target=True).sum(1)
    assert torch.allclose(exact_kl(p, q), kl, atol=1e-6)
    batch = dict(prompt_input_ids=torch.arange(3), chosen_labels=torch.arange(3))
    other = _other_answers(batch | dict(rejected_labels=torch.arange(3)))
    assert [x.tolist() for x in other.values()] == [[0, 1, 2], [2, 0, 1], [2, 0, 1]]
    with pytest.raises(ValueError, match="2 pairs at least"):
        _other_answers(dict(prompt_input_ids=torch.arange(1)))
    assert len(_other_answers(dict(prompt_input_ids=torch.arange(2)))) == 1


@pytest.mark.parametrize("losses, tokens", [(["simpo"], True), (["sigmoid"], False)])
def test_logged_rewards_of_single_tokens(losses, tokens):
    "Losses of means over tokens have rewards of means."
    values = [torch.tensor(x) for x in ([-1.0, -6.0], [-3.0, -2.0], [-2.0, -3.0], [-1.0, -4.0])]
    n, m = torch.tensor([1, 3]), torch.tensor([2, 1])
    config = DPOConfig(loss_type=losses, beta=0.5)
    now, then = (
        SimpleNamespace(chosen=a, rejected=b, chosen_tokens=n, rejected_tokens=m, logits=None)
        for a, b in (values[:2], values[2:])
    )
    found = _dpo_metrics(Pair(config, *values, n, m), now, then)
    ratios = [(1.0, -3.0), (-2.0, 2.0)]
    lengths = [(1, 3), (2, 1)] if tokens else [(1, 1), (1, 1)]
    for name, pair, size in zip(("chosen", "rejected"), ratios, lengths, strict=True):
        wanted = sum(0.5 * r / k for r, k in zip(pair, size, strict=True))
        assert float(found[f"rewards/{name}"][0]) == pytest.approx(wanted)
    read = {name: tuple(map(float, value)) for name, value in found.items()}
    assert read["logps/chosen"] == (-7, 2) and read["logps/rejected"] == (-5, 2)
    assert read["logps/ref_chosen"] == (-5, 2) and read["logps/ref_rejected"] == (-5, 2)
    assert read["loss/policy"] == (7, 4) and read["loss/reference"] == (5, 4)
    assert read["kl/sampled"] == (-2, 7)


@pytest.mark.parametrize(
    "values, flat",
    [
        ([1, 2], False),
        ([5, 1], False),  # Too few
        ([1, 2, 2], False),
        ([2, 2, 2], True),
        ([4, 5, 1], True),  # A gain of a quarter is none
        ([4, 5.5, 1], False),
        ([1, 4, 4, 5.5], False),
        ([1, 4, 4, 4.5], True),
        ([-4, -3, -4], True),
        ([-4, -2.5, -4], False),
    ],
)
def test_a_run_has_converged_when_its_last_evaluations_gain_nothing(values, flat):
    assert Converged(patience=2, threshold=0.25).flat(values) == flat
    assert Converged("eval_loss", 2, 0.25).flat([-value for value in values]) == flat


# --- log-probabilities of pairs against one answer at a time


@pytest.mark.parametrize("flat", [0, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_pairs_are_read_as_one_answer_at_a_time(share, flat, monkeypatch):
    "Prompts and answers of one token and of more; two tokens of an answer are not learned."
    monkeypatch.setattr(logprobs, "MAX_FLAT_TOKENS", flat)
    model = ours().eval()
    sizes = [(1, 1, 4), (5, 3, 1), (2, 6, 6), (7, 2, 3)]
    rng = np.random.default_rng(3)
    pairs = [
        {side: rng.integers(3, 96, n) for side, n in zip(SIDES, row, strict=True)} for row in sizes
    ]
    batch = collate_pairs(pairs)
    batch["chosen_labels"][2, 1:3] = -100
    with torch.no_grad():
        found = pair_log_probs(model, batch, share, keep_logits=True)
        for i, pair in enumerate(pairs):
            parts, counts = [], []
            for side in ("chosen", "rejected"):
                ids = np.concatenate((pair["prompt"], pair[side]))
                logits = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
                first = len(pair["prompt"])
                each = logits[first - 1 : -1].gather(1, torch.from_numpy(pair[side])[:, None])[:, 0]
                each = each[batch[f"{side}_labels"][i, : len(each)] != -100]
                parts.append(each)
                counts.append(len(each))
                assert float(getattr(found, side)[i]) == pytest.approx(float(each.sum()), abs=1e-4)
                assert int(getattr(found, f"{side}_tokens")[i]) == len(each)
            for side, each in zip(("chosen", "rejected"), parts, strict=True):
                part = float(each[: min(counts)].sum())
                shared = getattr(found, f"{side}_shared")[i]
                assert float(shared) == pytest.approx(part, abs=1e-4)
    assert len(found.logits) == len(found.first_chosen) == sum(b + c for _, b, c in sizes) - 2
    assert int(found.first_chosen.sum()) == sum(b for _, b, _ in sizes) - 2


def test_unpaired_rows_are_joined_with_the_answer_before():
    rows = [
        dict(prompt=[1], completion=[2, 3], labels=[-100, 3], label=1),
        dict(prompt=[4, 5], completion=[6], labels=[6], label=0),
        dict(prompt=[7], completion=[8, 9, 10], labels=[8, 9, 10], label=True),
    ]
    batch = collate_unpaired(rows, pad_id=50)
    assert batch["liked"].tolist() == [True, False, True]
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 50],
        [4, 5, 6, 50],
        [7, 8, 9, 10],
        [1, 8, 9, 10],
        [4, 5, 2, 3],
        [7, 6, 50, 50],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [3, 3, 4, 4, 4, 2]
    learned = [row[row != -100].tolist() for row in batch["labels"]]
    assert learned == [[3], [6], [8, 9, 10], [8, 9, 10], [3], [6]]
    assert (
        batch["labels"][batch["labels"] != -100] == batch["input_ids"][batch["labels"] != -100]
    ).all()
    with pytest.raises(ValueError, match="needs 2 rows"):
        collate_unpaired(rows[:1])
    assert len(collate_unpaired(rows[:1], compared=False)["labels"]) == 2
    assert len(collate_unpaired(rows[:2])["liked"]) == 2


def test_of_a_conversation_with_an_opinion_the_last_answer_is_learned():
    text = "system user assistant Is it so? No. And now? Yes. <>|_ "
    tok = BPETokenizer.train(
        [text * 9], 290, special_tokens=["<|im_start|>", "<|im_end|>"], progress=False
    )
    set_template(tok, "chatml")

    def turn(role, content):
        return dict(role=role, content=content)

    prompt = [turn("user", "Is it so?"), turn("assistant", "No."), turn("user", "And now?")]
    row = dict(prompt=prompt, completion=[turn("assistant", "Yes.")], label=False)
    (out,) = tokenize_unpaired([row], tok)
    before, answer = (tok.decode(out[part].tolist()) for part in ("prompt", "completion"))
    assert "No." in before and before.endswith("<|im_start|>assistant\n")
    assert answer == "Yes.<|im_end|>" and out["labels"].tolist() == out["completion"].tolist()
    assert out["length"] == len(out["prompt"]) + len(out["completion"]) and out["label"] is False
    size = out["length"]
    assert len(tokenize_unpaired([row], tok, size, truncation="drop")) == 1
    with pytest.raises(ValueError, match="no row is left of 1"), pytest.warns(UserWarning):
        tokenize_unpaired([row], tok, len(out["completion"]) - 1, truncation="drop")
    with pytest.warns(UserWarning, match="Of 1 rows 1 prompts lost their beginning"):
        (cut,) = tokenize_unpaired([row], tok, size - 1, truncation="prompt")
    assert cut["prompt"].tolist() == out["prompt"][1:].tolist() and cut["length"] == size - 1
    assert cut["completion"].tolist() == out["completion"].tolist()


@pytest.mark.parametrize(
    ("dtype", "off", "same"),
    [
        (torch.float32, 1.5e-4, True),
        (torch.float32, 1e-3, False),
        (torch.float64, 1e-3, False),
        (torch.bfloat16, 0.15, True),  # Three digits of a sum
        (torch.bfloat16, 0.3, False),
    ],
)
def test_a_prompt_is_shared_where_it_changes_no_more_than_rounding_does(
    dtype, off, same, monkeypatch
):
    "A log-probability of -1 may move by 2e-4, in half precision by 0.2."

    def moved(model, batch, share):
        return SimpleNamespace(chosen=torch.tensor([-1.0 - off * share]), rejected=torch.zeros(1))

    monkeypatch.setattr(logprobs, "pair_log_probs", moved)
    assert shares_prompts(ours().to(dtype)) is same


@pytest.mark.parametrize(("then", "wanted"), [(None, 2.5), ((0.5, 1.0), 1.75), ((9.0, 9.0), 0.0)])
def test_kto_estimates_its_distance_from_answers_to_other_prompts(then, wanted, monkeypatch):
    "The mean of (1, 2, 3, 4) less that of the reference, and no less than 0."
    from trainkit.align import dpo

    asked = []

    def scores(model, batch, share):
        asked.append(batch["chosen_labels"].tolist())
        return SimpleNamespace(chosen=torch.tensor([1.0, 2]), rejected=torch.tensor([3.0, 4]))

    def reference(model, batch):
        asked.append(batch["chosen_labels"].tolist())
        return SimpleNamespace(chosen=torch.full((2,), then[0]), rejected=torch.full((2,), then[1]))

    monkeypatch.setattr(dpo, "pair_log_probs", scores)
    batch = dict(prompt_input_ids=torch.zeros(2, 1), chosen_labels=torch.tensor([5, 6]))
    kl = dpo._estimate_kl(None, reference if then else None, batch, False)
    assert float(kl) == wanted and asked == [[6, 5]] * (2 if then else 1)
