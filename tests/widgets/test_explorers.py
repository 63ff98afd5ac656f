"Explorers compute what everybody's libraries compute, and every knob of each is turned."

import threading
import math

import numpy as np
import pytest
import torch

from trainkit.widgets.explorer import ExplorerView
from trainkit.widgets.model_explorers import AttentionExplorer, SamplingExplorer
from trainkit.widgets.text_explorers import (
    CurriculumExplorer,
    MaskViewer,
    PackingExplorer,
    TokenizerExplorer,
)
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

TEXT = "the whole of the earth was of one language, and of one speech. " * 20


@pytest.fixture(scope="module")
def tok():
    return BPETokenizer.train([TEXT], 290, special_tokens=["<|endoftext|>"], progress=False)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            vocab_size=290, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=64, max_seq_len=64
        )
    )


@pytest.fixture(scope="module")
def every(tok, model):
    "One of each of the explorers of this file, by a function that makes it."
    rows = [
        dict(prompt="the earth", completion=" was of one speech"),
        dict(prompt="of", completion=" one"),
    ]
    return {
        "tokenizer": lambda: TokenizerExplorer(tok, tok.to_hf()),
        "mask": lambda: MaskViewer(rows, tok),
        "packing": lambda: PackingExplorer(),
        "curriculum": lambda: CurriculumExplorer(),
        "attention": lambda: AttentionExplorer(model, tok, text=TEXT[:60]),
        "sampling": lambda: SamplingExplorer(model, tok, prompt=TEXT[:30]),
    }


NAMES = ["tokenizer", "mask", "packing", "curriculum", "attention", "sampling"]


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_is_turned(every, name):
    "Each control is moved as by hand; explorer and picture follow without an error."
    view = ExplorerView(every[name]())
    view.every = 0
    moved = 0
    for knob in view.explorer.knobs():
        control = view.controls[knob.name]
        if knob.choices:
            values = [c for c in knob.choices if c != knob.value][:3]
        elif control.slider is not None:
            values = [control.slider.min, control.slider.max]
        else:
            values = ["of one language" + "x" * len(knob.value)]
        for value in values:
            target = control.slider if control.slider is not None else control.widget
            before = view.explorer.__dict__.copy()
            target.value = value
            assert not control.wrong.value and 'role="alert"' not in view.alert.value, (
                knob.name,
                value,
                view.alert.value,
            )
            moved += before[knob.name] != getattr(view.explorer, knob.name)
            assert view.picture.value == str(view.explorer.picture())
        view.explorer.set(**{knob.name: knob.value})
    assert moved >= len(view.controls)
    view.close()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_values_are_said_and_change_nothing(every, name):
    view = ExplorerView(every[name]())
    view.every = 0
    for knob in view.explorer.knobs():
        control = view.controls[knob.name]
        if control.slider is None:
            continue
        before, picture = getattr(view.explorer, knob.name), view.picture.value
        for wrong in ("many", str(10 * knob.high + 10), "", "nan"):
            control.widget.value = wrong
            assert (
                'role="alert"' in control.wrong.value
                and getattr(view.explorer, knob.name) == before
                and view.picture.value == picture
            ), (knob.name, wrong)
        control.widget.value = f"{before}"
        assert not control.wrong.value
    view.close()


def test_what_compute_refuses_is_said_and_the_last_picture_stays(every):
    view = ExplorerView(every["sampling"]())
    view.every = 0
    picture = view.picture.value
    view.controls["prompt"].widget.value = ""
    assert (
        'role="alert"' in view.alert.value
        and "text is empty" in view.alert.value
        and view.picture.value == picture
    )
    view.controls["prompt"].widget.value = "the whole"
    assert not view.alert.value and view.picture.value != picture
    view.close()


@pytest.mark.parametrize("name", NAMES)
def test_static_pages(every, name, monkeypatch):
    "Well-formed HTML without any widget, and the same numbers as on the page."
    from xml.etree import ElementTree

    explorer = every[name]()
    page = explorer._repr_html_()
    ElementTree.fromstring(
        "<div>" + page.replace("<hr style", '<hr x="" style').replace("&nbsp;", " ") + "</div>"
    )
    assert explorer.picture() in page and "aria-label" in page
    assert all(f"{k.name.replace('_', ' ')} <b>" in page for k in explorer.knobs())


def test_show_without_widgets_and_without_a_kernel(every, monkeypatch):
    import sys

    import IPython.display

    shown = []
    monkeypatch.setattr(
        IPython.display, "display", lambda thing, **more: shown.append((thing, more))
    )
    explorer = every["packing"]()
    explorer.show()  # no kernel here
    assert shown[-1][0] == explorer._repr_html_() and explorer.view is None
    kernel = type(
        "Shell",
        (),
        dict(
            kernel=object(),
            execution_count=1,
            get_parent=lambda self: dict(metadata=dict(cellId="a")),
        ),
    )()
    monkeypatch.setattr(IPython, "get_ipython", lambda: kernel)
    explorer.show()
    data = shown[-1][0]
    assert set(data) == {
        "application/vnd.jupyter.widget-view+json",
        "text/html",
        "text/plain",
    } and shown[-1][1] == dict(raw=True)
    first = explorer.view
    explorer.show()  # twice in one run of a cell: both stay
    assert not first.closed
    kernel.execution_count = 2
    explorer.show()  # the cell runs again
    assert first.closed and not explorer.view.closed
    explorer.view.close()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer.show()
    assert "pip install" in shown[-1][0] and "<svg" in shown[-1][0]


def test_no_widgets_are_left_behind(every):
    import ipywidgets

    alive = (
        ipywidgets.widgets.widget._instances
        if hasattr(ipywidgets.widgets.widget, "_instances")
        else ipywidgets.Widget.widgets
    )
    before = len(alive)
    ExplorerView(every["attention"]()).close()
    assert len(alive) <= before


def test_five_pictures_a_second(every):
    "A slider that is dragged makes one picture at once and one at its end."
    view = ExplorerView(every["packing"]())
    count = []
    view.every, compute = 1000, type(view.explorer).compute
    view.explorer.compute = lambda: count.append(1) or compute(view.explorer)
    for n in range(50):
        view.controls["documents"].slider.value = 100 + n
    assert not count and view.waiting is not None and view.explorer.documents == 149
    view.draw()
    assert len(count) == 1 and view.waiting is None and "149 documents" in view.picture.value
    view.close()
    assert view.waiting is None


def test_timers_draw_by_themselves(every):
    "Without an event loop a thread draws what is left; with one, the loop does."
    import asyncio

    view = ExplorerView(every["packing"]())

    def alone():  # A thread of its own has no event loop, whatever other tests left behind
        view.every = 0.02
        view.draw()
        view.controls["documents"].slider.value = 77
        if view.waiting is not None:
            view.waiting.join(120)

    thread = threading.Thread(target=alone)
    thread.start()
    thread.join(120)
    assert "77 documents" in view.picture.value

    async def drag():
        view.every = 0.02
        view.draw()
        view.controls["documents"].slider.value = 78
        for _ in range(12_000):
            if view.waiting is None:
                break
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(drag()))
    thread.start()
    thread.join(120)
    assert "78 documents" in view.picture.value
    view.close()


def test_the_last_token_of_a_text_is_the_last_that_can_be_chosen(every):
    view = ExplorerView(every["attention"]())
    view.every = 0
    explorer, token = view.explorer, view.controls["token"]

    def ends_at():
        "The last token shown, if the limits of explorer and slider say so."
        last = len(explorer.compute().ids) - 1
        (limited,) = [k for k in explorer.knobs() if k.name == "token"]
        assert limited.high == token.slider.max == last and not token.wrong.value
        return last

    assert explorer.token == ends_at()
    view.controls["text"].widget.value = "of one"
    assert explorer.token == ends_at() < 5
    view.controls["text"].widget.value = TEXT[:40]
    assert explorer.token == ends_at() > 5  # The last one stays the last one
    token.slider.value = 2
    view.controls["text"].widget.value = TEXT[:30]
    assert explorer.token == 2 < ends_at()
    token.widget.value = f"{ends_at() + 1}"
    assert "must be" in token.wrong.value and explorer.token == 2
    view.close()


def test_attention_is_that_of_transformers(model, tok):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=290,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=64,
            max_position_embeddings=64,
            rms_norm_eps=model.config.norm_eps,
            attn_implementation="eager",
        )
    )
    theirs.load_state_dict(model.state_dict())
    ours = AttentionExplorer(model, tok, text=TEXT[:80]).compute()
    with torch.no_grad():
        wanted = torch.cat(
            theirs.eval()(torch.tensor([ours.ids]), output_attentions=True).attentions
        )
    torch.testing.assert_close(ours.weights, wanted, atol=1e-5, rtol=0)
    assert model.training  # as it was before


@pytest.mark.parametrize(
    "knobs",
    [
        dict(),
        dict(temperature=0.0),
        dict(temperature=1.7, top_k=9),
        dict(top_p=0.6, min_p=0.02),
        dict(repetition_penalty=1.6, top_k=40, top_p=0.8, min_p=0.9),
    ],
)
def test_sampling_is_that_of_generate(model, tok, knobs):
    from trainkit.model.generation import SamplingConfig, adjust

    explorer = SamplingExplorer(model, tok, prompt=TEXT[:30], **knobs)
    result = explorer.compute()
    ids = torch.tensor([tok.encode(TEXT[:30])])
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, -1]
    wanted = adjust(logits, ids, SamplingConfig(**knobs))
    if knobs.get("temperature") == 0:
        assert result.after.argmax() == wanted.argmax() and result.after.max() == 1
    else:
        torch.testing.assert_close(result.after, wanted.softmax(-1)[0], atol=1e-6, rtol=0)
    assert torch.equal(
        sum(cut.int() for cut in result.cuts.values()), (result.after == 0).int()
    )  # each by one knob


def test_merges_are_those_of_tiktoken(tok):
    from trainkit.widgets.text_explorers import joins

    theirs = tok.to_tiktoken()
    draw = np.random.default_rng(0)
    for word in (
        b" language",
        b"x",
        *(bytes(draw.choice([*b" theoflangusprw"], 12).tolist()) for _ in range(300)),
    ):
        start, steps = joins(word, tok)
        assert len(start) == len(word) and (
            steps[-1].ids if steps else start
        ) == theirs._encode_single_piece(word)
        assert all(
            len(b.ids) == len(a) - 1
            for a, b in zip([start, *(s.ids for s in steps)], steps, strict=False)
        )


def test_packing_and_curriculum_are_what_training_does():
    from trainkit.data.dataloader import Batches
    from trainkit.data.dataloader import pack

    lengths = [5, 9, 3, 12, 7, 4, 4, 16]
    rows = [dict(input_ids=np.arange(n)) for n in lengths]
    for strategy in ("greedy", "first_fit", "best_fit"):
        result = PackingExplorer(rows, max_length=16, strategy=strategy).compute()
        packed = pack(rows, 16, strategy)
        assert [[n for i in row for n in range(lengths[i])] for row in result.rows] == [
            row["input_ids"].tolist() for row in packed
        ]
        assert math.isclose(result.each[strategy][1], sum(lengths) / (16 * len(packed)))
    explorer = CurriculumExplorer(
        rows, order="length_based", batch_size=2, start_length=4, end_length=16, steps=3, seed=5
    )
    plan = Batches(rows, 2, seed=5, curriculum=explorer.config()).plan(0)
    assert [b.tolist() for b in explorer.compute().batches] == [b.tolist() for b in plan]


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (420, "dark")])
def test_static_pages_fit_the_page(browser, every, width, scheme):
    "Without a kernel: nothing sticks out to the side, and nothing is an error."
    page, errors = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme), []
    page.on("pageerror", lambda e: errors.append(str(e)))
    for name, make in every.items():
        page.set_content(
            f'<body style="margin:12px;font:14px system-ui">{make()._repr_html_()}</body>'
        )
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
        assert page.locator("[role=alert]").count() == 0 and page.locator(
            "[role=group]"
        ).first.get_attribute("aria-label"), name
    assert not errors
    page.close()


def test_every_explorer_stands_in_its_lesson():
    "In the lesson of its idea, in a plain cell, with a picture for readers without a kernel."
    import json
    import re

    from support.processes import ROOT
    from trainkit import widgets

    explorers = {
        name
        for name in dir(widgets)
        if name.endswith("Explorer") or name in ("MaskViewer", "MemoryPlanner")
    } - {"Explorer"}
    shown = {}
    for path in sorted((ROOT / "nbs").glob("0*/*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source, html = (
                "".join(cell["source"]),
                "".join(
                    "".join(o.get("data", {}).get("text/html", "")) for o in cell.get("outputs", [])
                ),
            )
            for name in explorers:
                if (
                    f"{name}(" in source
                    and source.endswith(".show()")
                    and re.search(f'role="group"[^>]* aria-label="{name}"', html)
                ):
                    assert not source.startswith("#|") and 'role="alert"' not in html, (
                        f"{path.stem}: {name}"
                    )
                    shown.setdefault(name, []).append(path.stem)
    assert {*shown} == explorers


@pytest.mark.parametrize("missing", ["IPython", "ipywidgets"])
def test_without_a_notebook_the_remedy_is_said(every, monkeypatch, missing):
    import builtins
    from trainkit.widgets.form import Page
    from trainkit.widgets.panel import TrainerPanel
    from trainkit.recipes.config import RunConfig

    explorer, page, panel = every["packing"](), Page(lambda: ""), TrainerPanel(RunConfig())
    real = builtins.__import__

    def lacks(name, *rest):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacks)
    shows = (
        [explorer.show, page.show, panel.show]
        if missing == "IPython"
        else [
            lambda: Page(lambda: ""),
            lambda: TrainerPanel(RunConfig()),
            lambda: ExplorerView(explorer),
        ]
    )
    for show in shows:
        with pytest.raises(
            ImportError, match=rf"needs {missing}: pip install 'trainkit-llm\[lab\]'"
        ):
            show()
    monkeypatch.undo()
    for each in (page, panel):
        each.close()
