"What a run leaves behind, in a real browser."
import pytest

pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    from trainkit.config import load_config
    from trainkit.recipes import RunConfig, run
    folder = tmp_path_factory.mktemp('runs')
    small = ['data.path=stdlib', 'data.max_chars=200000', 'data.max_length=64', 'tokenizer.vocab_size=400', 'model.d_model=32',
             'model.n_heads=2', 'model.n_layers=1', 'model.d_ff=64', 'train.max_steps=20', 'train.logging_steps=2', 'train.eval_steps=5',
             'train.eval_strategy=steps', 'train.per_device_train_batch_size=4', 'sampling.max_new_tokens=10', f'runs_dir={folder}', 'name=seen']
    return run(load_config(RunConfig, {}, small), verbose=False).report


@pytest.mark.parametrize('width', [1200, 420])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_report_reads_well(browser, report, width, scheme):
    "No error, no request, no sideways scrolling, and text that stands out from its ground in both schemes."
    page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
    errors, requests = [], []
    page.on('console', lambda m: errors.append(m.text) if m.type == 'error' else None)
    page.on('pageerror', lambda e: errors.append(str(e)))
    page.on('request', lambda r: requests.append(r.url))
    page.goto(report.as_uri())
    assert not errors and len(requests) == 1, (errors, requests)
    assert page.locator('svg[role=img]').count() >= 4
    labels = page.locator('svg[role=img]').evaluate_all('all => all.map(e => e.getAttribute("aria-label"))')
    assert all(labels) and any('Loss' in label for label in labels)
    assert page.evaluate('document.documentElement.scrollWidth <= window.innerWidth'), 'nothing sticks out to the side'
    light = 'c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); return .2126*r + .7152*g + .0722*b }'
    ground, ink = (page.evaluate(f'({light})(getComputedStyle(document.body).{kind})') for kind in ('backgroundColor', 'color'))
    assert abs(ground - ink) > 150 and (ground > ink) == (scheme == 'light')
    page.close()
