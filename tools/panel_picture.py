"""Make the README's picture of the panel: a real one in JupyterLab, in Chromium, in training.

`python tools/panel_picture.py` writes nbs/images/panel.png.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "widgets"), str(ROOT / "tests"), str(ROOT)]

import test_browser  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

PANEL = """
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel

words = ('data.max_chars=300000 data.max_length=64 tokenizer.vocab_size=512 '
         'model.d_model=64 model.n_heads=4 model.n_layers=2 model.d_ff=176 '
         'train.max_steps=600 train.logging_steps=2 train.eval_strategy=steps '
         'train.eval_steps=40 train.sample_steps=100 train.per_device_train_batch_size=8 '
         'optim.optim=muon optim.learning_rate=0.02 sampling.max_new_tokens=16').split()
panel = TrainerPanel(load_config(RunConfig, dict(runs_dir='runs', name='seen'), words))
panel.show()
"""


def main(step=400):
    fixture = getattr(test_browser.lab, "_fixture_function", None) or test_browser.lab.__wrapped__
    server = fixture(SimpleNamespace(mktemp=lambda name: Path(tempfile.mkdtemp(prefix=name))))
    place = next(server)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox", "--disable-gpu"],
        )
        page = test_browser.open_notebook(
            browser,
            place,
            "panel.ipynb",
            [PANEL],
            viewport=dict(width=1100, height=1800),
            color_scheme="light",
        )
        start = page.locator("button:text-is('Start')")
        start.wait_for()
        page.locator("text=/A step will take about/").first.wait_for()
        start.click()
        page.wait_for_function(
            (
                'step => [...document.querySelectorAll("div")].some(d => '
                "Number(d.innerText?.match(/^running · step ([0-9,]+)/)?.[1]) >= step)"
            ),
            arg=step,
        )
        box = page.locator(".jp-OutputArea-output").first.bounding_box()
        shot = page.screenshot(
            clip=dict(x=box["x"], y=box["y"], width=box["width"], height=min(box["height"], 1150))
        )
        browser.close()
    next(server, None)
    (ROOT / "nbs" / "images").mkdir(exist_ok=True)
    Image.open(io.BytesIO(shot)).convert("RGB").save(
        ROOT / "nbs" / "images" / "panel.png", optimize=True
    )


if __name__ == "__main__":
    main()
