"Explorers of training, weights and memory show what the kit computes and can be driven."

import json
import math

import pytest
import torch

from trainkit.align.dpo import LOSSES, USED_BY, DPOConfig, preference_loss
from trainkit.widgets.explorer import ExplorerView, explorer_html
from trainkit.lora.inject import LoRAConfig
from trainkit.lora.inject import add_lora
from trainkit.widgets.weight_explorers import (
    LoRAExplorer,
    made_up_update,
    matrices,
    merge_errors,
    updates,
)
from trainkit.widgets.training_explorers import (
    METHODS,
    MemoryPlanner,
    gpu_table,
    model_shape,
    waterfall,
)
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.quant.nf4 import dequantize_4bit, quantize_4bit
from trainkit.train.optim import SCHEDULES, OptimConfig, make_schedule
from trainkit.memory.planner import MACHINES, Setup, find_machine, plan_memory, predict_setup
from trainkit.widgets.weight_explorers import QUANTS, QuantExplorer, quantization_error
from trainkit.widgets.training_explorers import DPOExplorer, ScheduleExplorer, phases, pull, rates

TINY = ModelConfig(vocab_size=300, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=128)


@pytest.fixture
def driven():
    "A view of an explorer that draws at every turn; closed afterwards."
    views = []

    def make(explorer):
        view = ExplorerView(explorer)
        view.every = 0
        views.append(view)
        return view

    yield make
    for view in views:
        view.close()


def turn(view, **values):
    for name, value in values.items():
        widget = view.controls[name].widget
        widget.value = (
            str(value)
            if isinstance(widget.value, str) and not hasattr(widget, "options")
            else value
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drawn_rates_are_those_of_a_run(schedule):
    explorer = ScheduleExplorer(
        lr_scheduler_type=schedule,
        learning_rate=2e-3,
        total_steps=57,
        warmup_ratio=0.1,
        min_lr_ratio=0.05,
        num_cycles=2,
        power=2,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    lr_schedule, obeyed = make_schedule(optimizer, explorer.config(schedule), 57), []
    for _ in range(57):
        obeyed.append(optimizer.param_groups[0]["lr"])
        optimizer.step(), lr_schedule.step()
    assert explorer.compute()["rates"][schedule] == obeyed
    ours = phases(obeyed)
    assert (
        ours[0][1] == 0
        and ours[-1][2] == 57
        and all(a[2] == b[1] for a, b in zip(ours, ours[1:], strict=False))
    )


def test_a_schedule_of_one_step_and_of_no_rate():
    for values in (
        dict(total_steps=1),
        dict(total_steps=2),
        dict(learning_rate=1e-6, min_lr_ratio=1, warmup_ratio=0),
    ):
        for name in SCHEDULES:
            assert "<svg" in explorer_html(ScheduleExplorer(lr_scheduler_type=name, **values))
    assert rates(OptimConfig(learning_rate=0), 3) == [0, 0, 0]


@pytest.mark.parametrize("loss", LOSSES)
def test_pull_is_the_gradient(loss):
    "Each pair alone, by plain autograd."
    config = DPOConfig(
        loss_type=[loss], beta=0.3, label_smoothing=0.1 * (loss in USED_BY["label_smoothing"])
    )
    draw = torch.Generator().manual_seed(0)
    pairs = -torch.rand(7, 2, generator=draw, dtype=torch.double) * 30 - 1
    value, up, down = pull(config, pairs[:, 0], pairs[:, 1], -12.0, -9.0, (5, 9))
    for i, (c, r) in enumerate(pairs):
        c, r = c[None].requires_grad_(), r[None].requires_grad_()
        one = preference_loss(
            c,
            r,
            torch.tensor([-12.0]).double(),
            torch.tensor([-9.0]).double(),
            config,
            torch.tensor([5.0]),
            torch.tensor([9.0]),
        )
        grads = torch.autograd.grad(one.sum(), (c, r), allow_unused=True)
        right = [one.item()] + [
            sign * (0 if g is None else g.item()) for sign, g in zip((-1, 1), grads, strict=True)
        ]
        assert [x[i].item() for x in (value, up, down)] == pytest.approx(right, rel=1e-9, abs=1e-12)


def test_the_curve_goes_through_the_pair():
    explorer = DPOExplorer(
        loss_type="robust",
        beside="simpo",
        label_smoothing=0.2,
        chosen=-31,
        rejected=-77,
        ref_chosen=-40,
        ref_rejected=-70,
    )
    result = explorer.compute()
    assert explorer.delta == pytest.approx(16)
    for part in result["losses"].values():
        at = (result["delta"] - 16).abs().argmin()
        for curve, pair in zip(part["curve"], part["pair"], strict=True):
            assert curve[at].item() == pytest.approx(pair, rel=0.05, abs=2e-3)
    one = preference_loss(
        *(torch.tensor([x]) for x in (-31.0, -77.0, -40.0, -70.0)),
        DPOConfig(loss_type=["robust"], label_smoothing=0.2),
    )
    assert result["losses"]["robust"]["pair"][0] == pytest.approx(one.item(), rel=1e-6)
    plain = DPOExplorer(beta=0.2).compute()
    torch.testing.assert_close(
        plain["losses"]["sigmoid"]["curve"][0],
        -torch.nn.functional.logsigmoid(0.2 * plain["delta"]),
    )  # The axis is what it says
    chosen, rejected = (
        explorer.chosen + (result["delta"] - 16) / 2,
        explorer.rejected - (result["delta"] - 16) / 2,
    )
    assert max(chosen.max(), rejected.max()) <= 1e-9  # Probabilities of at most 1


def test_far_pairs_are_drawn():
    for values in (
        dict(chosen=-900, ref_chosen=-100),
        dict(chosen=0, rejected=-2000),
        dict(chosen=0, rejected=0, ref_chosen=0, ref_rejected=0),
        dict(beta=10),
    ):
        for loss in ("sigmoid", "ipo", "orpo", "discopop", "kto", "sppo_hard"):
            picture = explorer_html(DPOExplorer(loss_type=loss, **values))
            assert 'role="alert"' not in picture and "nan" not in picture


def test_spectrum_is_that_of_torch():
    torch.manual_seed(0)
    for shape in ((40, 30), (30, 40)):
        before, after = {"w": torch.randn(shape)}, {"w": torch.randn(shape)}
        result = LoRAExplorer((before, after), rank=7).compute()
        right = torch.linalg.svdvals(after["w"] - before["w"])
        torch.testing.assert_close(result["strengths"], right.double(), atol=1e-5, rtol=1e-6)
        assert result["share"] == pytest.approx(
            (right[:7].square().sum() / right.square().sum()).item(), rel=1e-5
        )
        assert result["bytes"] == 4 * 7 * 70


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(use_rslora=True),
        dict(use_dora=True),
        dict(init_lora_weights="pissa"),
        dict(r=3, rank_pattern={"up_proj": 5}),
    ],
    ids=str,
)
def test_update_of_an_adapter_is_what_merging_adds(options, tmp_path):
    from trainkit.lora.adapters import save_adapter
    from trainkit.lora.merge import merge_lora

    torch.manual_seed(0)
    model = Transformer(TINY)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_lora(model, LoRAConfig(target_modules="all-linear", **{"r": 4, **options}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                p.add_(0.05 * torch.randn_like(p))
    ours = {name: make() for name, make in updates(model).items()}
    folder = not options.keys() & {"use_dora", "init_lora_weights"}
    if folder:
        save_adapter(model, tmp_path / "adapter")
        for name, make in updates((plain, tmp_path / "adapter")).items():
            torch.testing.assert_close(make().delta, ours[name].delta)
    merge_lora(model)  # In place, which changes no update that was taken before
    assert len(ours) == 7
    for name, update in ours.items():
        after = model.get_parameter(f"{name}.weight")
        torch.testing.assert_close(update.base + update.delta, after, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            update.strengths(),
            torch.linalg.svdvals(update.delta)[: len(update.strengths())],
            atol=1e-5,
            rtol=1e-4,
        )


def test_a_difference_stays_when_its_models_are_trained_on():
    before, after = {"w": torch.zeros(2, 3)}, {"w": torch.ones(2, 3)}
    update = updates((before, after))["w"]()
    before["w"] += 5
    assert torch.equal(update.base, torch.zeros(2, 3)) and torch.equal(update.delta, after["w"])


def test_merge_errors_are_those_of_the_quantizer():
    update = made_up_update()
    whole, size = update.base + update.delta, update.delta.norm()
    errors = merge_errors(update)
    assert errors["bfloat16"] == pytest.approx(
        ((whole.bfloat16().float() - whole).norm() / size).item(), rel=1e-2
    )
    assert errors["nf4"] == pytest.approx(
        ((dequantize_4bit(quantize_4bit(whole)) - whole).norm() / size).item(), rel=1e-4
    )


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_errors_are_those_of_quantizing(kind, blocksize, double_quant):
    explorer = QuantExplorer(
        torch.randn(37, 100, generator=torch.Generator().manual_seed(0)),
        quant_type=kind,
        blocksize=blocksize,
        double_quant=double_quant,
        outlier=9,
    )
    weight, _ = explorer.weight()
    quantized = quantize_4bit(weight, kind, blocksize, double_quant)
    off, result = dequantize_4bit(quantized) - weight, explorer.compute()["each"][kind]
    assert (result["mse"], result["max"], result["bytes"]) == (
        off.square().mean().item(),
        off.abs().max().item(),
        quantized.nbytes,
    )
    assert weight[0, 0] == pytest.approx(9 * explorer.set(outlier=0).weight()[0].std().item())
    assert explorer.weight()[0][0, 0] != weight[0, 0], "the reader's weight is left as it was"


def test_every_kind_of_codes_on_half_precision_and_odd_shapes():
    for weight in (torch.randn(3, 5).half(), torch.randn(1, 70).bfloat16(), torch.zeros(4, 8)):
        for kind in QUANTS:
            assert quantization_error(weight.float(), kind)["back"].shape == weight.shape
            assert 'role="alert"' not in explorer_html(QuantExplorer(weight, quant_type=kind))


def test_matrices_of_a_quantized_model_and_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel
    from trainkit.quant.quantize import QuantConfig, quantize_model

    model = Transformer(TINY)
    right = model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    quantize_model(model, QuantConfig(bits=4))
    matrix = matrices(model)["model.layers.0.mlp.up_proj.weight"]()
    torch.testing.assert_close(matrix, dequantize_4bit(quantize_4bit(right)))
    theirs = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    )
    names = [*matrices(theirs)]
    assert "transformer.h.0.mlp.c_fc.weight" in names
    assert "<svg" in explorer_html(QuantExplorer(theirs, layer="transformer.h.0.mlp.c_fc.weight"))


@pytest.mark.parametrize("method", METHODS)
def test_planner_shows_what_is_predicted(method):
    explorer = MemoryPlanner(TINY, method=method, batch_size=4, seq_len=32, lora_rank=4)
    setup = METHODS[method](Setup(4, 32), 4, MACHINES["T4"].half)
    assert (setup.lora_rank, setup.half_weights, setup.bits) == {
        "full": (0, False, None),
        "LoRA": (4, True, None),
        "QLoRA": (4, True, 4),
    }[method]
    report = predict_setup(TINY, setup)
    result = explorer.compute()
    assert (result["report"].parts, result["report"].peak) == (report.parts, report.peak)
    assert result["plan"].setup == setup and result["plan"].levers == []


def test_planner_pulls_levers_and_keeps_the_method(monkeypatch):
    small = find_machine("200 kB")  # Even LoRA would be pulled, if it might be
    monkeypatch.setitem(MACHINES, "T4", small)
    explorer = MemoryPlanner(TINY, method="full", batch_size=16, seq_len=128)
    result = explorer.compute()
    levers = [
        "accumulate",
        "chunked loss",
        "half precision",
        "checkpointing",
        "8-bit optimizer",
        "step in backward",
        "offload",
        "shorter rows",
    ]
    right = plan_memory(TINY, small, explorer.setup("full"), levers)
    assert (result["plan"].peak, result["plan"].waterfall, result["plan"].setup.lora_rank) == (
        right.peak,
        right.waterfall,
        0,
    )
    assert (
        result["plan"].levers
        and not right.fits
        and "whatever lever is pulled" in explorer_html(explorer)
    )


def test_model_of_a_planner(tmp_path):
    shape = dict(
        model_type="llama",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    (tmp_path / "config.json").write_text(json.dumps(shape))
    from transformers import LlamaConfig

    for source in (
        shape,
        tmp_path,
        str(tmp_path),
        tmp_path / "config.json",
        LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"}),
    ):
        assert model_shape(source) == model_shape(shape)

    def make():
        return Transformer(TINY)

    result = MemoryPlanner(make, method="full", batch_size=2, seq_len=16).compute()
    assert (
        result["report"].parts
        == predict_setup(make, METHODS["full"](Setup(2, 16), 0, "fp16")).parts
    )
    with pytest.raises(ValueError, match="folder with config.json"):
        model_shape("nowhere")
    with pytest.raises(ValueError, match="none of the families"):
        model_shape({"model_type": "t5"})


def test_pictures_of_memory():
    assert "→" in waterfall({"a": 1e6}, 1e9) and "→" not in waterfall({"a": 1e9}, 1e9)
    picture = gpu_table({"full": 20_000_000_000})
    assert "H200" in picture and "✗ 2.1×" in picture  # RTX 3080


@pytest.mark.parametrize(
    "explorer, turns",
    [
        (
            ScheduleExplorer,
            dict(
                lr_scheduler_type="linear",
                beside="polynomial",
                learning_rate="1e-3",
                total_steps=50,
                warmup_ratio=0.3,
                min_lr_ratio=0.1,
                decay_ratio=0.5,
                num_cycles=2,
                power=3,
            ),
        ),
        (
            DPOExplorer,
            dict(
                loss_type="ipo",
                beside="kto",
                beta=0.5,
                label_smoothing=0.1,
                chosen=-10,
                rejected=-30,
                ref_chosen=-20,
                ref_rejected=-20,
                chosen_tokens=7,
                rejected_tokens=9,
            ),
        ),
        (LoRAExplorer, dict(rank=9, log_scale=True)),
        (QuantExplorer, dict(quant_type="fp4", blocksize=128, double_quant=False, outlier=12.5)),
    ],
)
def test_every_knob_turns(driven, explorer, turns):
    "By hand, in the widgets; each turn shows what a fresh explorer would show."
    view = driven(explorer())
    assert {*view.controls} - {*turns} <= {"layer"}
    for name, value in turns.items():
        turn(view, **{name: value})
        assert not view.alert.value and not view.controls[name].wrong.value, (
            name,
            view.alert.value,
        )
    values = {k.name: k.value for k in view.explorer.knobs()}
    assert all(
        values[name] == (float(value) if name == "learning_rate" else value)
        for name, value in turns.items()
    )
    assert view.picture.value == explorer(**values).picture() != explorer().picture()


@pytest.mark.parametrize(
    "explorer, wrong",
    [
        (ScheduleExplorer, dict(total_steps=0)),
        (ScheduleExplorer, dict(learning_rate="fast")),
        (DPOExplorer, dict(beta=0)),
        (DPOExplorer, dict(chosen=3)),
        (LoRAExplorer, dict(rank=97)),
        (QuantExplorer, dict(outlier=-1)),
    ],
)
def test_a_wrong_value_is_refused_and_the_picture_stays(driven, explorer, wrong):
    view = driven(explorer())
    before = view.picture.value
    ((name, value),) = wrong.items()
    turn(view, **{name: value})
    assert 'role="alert"' in view.controls[name].wrong.value and view.picture.value == before
    turn(view, **{name: getattr(explorer(), name)})
    assert not view.controls[name].wrong.value and view.picture.value == before


def test_a_loss_that_cannot_be_is_said(driven):
    view = driven(DPOExplorer())
    before = view.picture.value
    turn(view, loss_type="exo_pair")
    assert (
        'role="alert"' in view.alert.value
        and "label_smoothing" in view.alert.value
        and view.picture.value == before
    )
    turn(view, label_smoothing=0.1)
    assert not view.alert.value and "exo_pair" in view.picture.value


def test_layers_are_chosen_and_the_rank_follows(driven):
    model = Transformer(TINY)
    torch.manual_seed(0)
    changed = {
        name: p.detach() + 0.01 * torch.randn_like(p) for name, p in model.named_parameters()
    }
    view = driven(LoRAExplorer((model, changed)))
    for name in view.explorer.updates:
        turn(view, layer=name)
        assert not view.alert.value and view.explorer.compute()["shape"] == tuple(
            model.get_parameter(name).shape
        )
    view = driven(QuantExplorer(model))
    for name in matrices(model):
        turn(view, layer=name)
        assert name in view.picture.value


def test_the_planner_waits_for_its_button(driven):
    view = driven(MemoryPlanner(TINY, method="full", batch_size=2, seq_len=16))
    assert not view.picture.value and "Compute" in view.alert.value
    assert view.controls["model"].widget.options[0] == ("yours", "yours")
    messages = []
    view.alert.observe(lambda change: messages.append(change["new"]), names="value")
    view.button.click()
    assert "Full training of yours" in view.picture.value and any(
        "without its numbers" in text for text in messages
    )
    before = view.picture.value
    turn(view, method="LoRA", gpu="2xT4", lora_rank=2, all_gpus=True, seq_len=20, batch_size=6)
    assert view.picture.value == before
    view.button.click()
    assert (
        "on each of 2 cards" in view.picture.value
        and "H200" in view.picture.value
        and not view.alert.value
    )
    turn(view, seq_len=1000)
    view.controls["model"].widget.value = "yours"
    assert "≤ 128" in view.controls["seq_len"].wrong.value


def test_numbers_are_finite():
    "Nothing of what the default explorers show is NaN or infinite."
    for explorer in (ScheduleExplorer(), DPOExplorer(), LoRAExplorer(), QuantExplorer()):
        text = explorer.picture()
        assert "nan" not in text and "inf" not in text.replace("info", "")
    assert all(math.isfinite(x) for x in merge_errors(made_up_update()).values())


def test_smoothing_that_a_loss_ignores_is_said():
    "One knob for two losses: it reaches the one that reads it, and a note names the other."
    shown = explorer_html(DPOExplorer(loss_type="ipo", beside="robust", label_smoothing=0.2))
    assert "label_smoothing has no effect on ipo;" in shown
    assert "no effect" not in explorer_html(
        DPOExplorer(loss_type="sigmoid", beside="robust", label_smoothing=0.2)
    )
