"A small model learns to answer from a file of questions and answers, in Python and from a shell, and opens elsewhere."
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import shell

from trainkit.config import load_config
from trainkit.dataset import DataConfig
from trainkit.optim import OptimConfig
from trainkit.plan import TrainConfig
from trainkit.recipes import RunConfig, SFTConfig, run

NAMES = 'zero one two three four five six seven eight nine ten eleven'.split()
ASKS = ['Spell {}.', 'What is {} in words?', 'Write {} as a word.', 'How do you say {}?', 'Name the number {}.', '{} in letters:']
TINY = {'data': {'path': 'stdlib', 'max_chars': 200_000, 'max_length': 64}, 'tokenizer': {'vocab_size': 512},
        'model': {'d_model': 64, 'n_heads': 2, 'n_layers': 2, 'd_ff': 128}, 'optim': {'learning_rate': 3e-3},
        'train': {'max_steps': 40, 'save_strategy': 'no'}, 'name': 'base'}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A base model that has read a little code, and 72 questions with their answers."
    folder = tmp_path_factory.mktemp('sft')
    run(load_config(RunConfig, {**TINY, 'runs_dir': str(folder/'runs')}), verbose=False)
    rows = [dict(prompt=ask.format(n), completion=name) for n, name in enumerate(NAMES) for ask in ASKS]
    (folder/'pairs.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return folder


def config(home, name, packing='best_fit', **train):
    return RunConfig(name=name, runs_dir=str(home/'runs'), method='sft', init_from=str(home/'runs'/'base'/'model'),
                     data=DataConfig(path=str(home/'pairs.jsonl'), eval_fraction=0.2, test_fraction=0.1, max_length=64),
                     sft=SFTConfig(packing=packing), optim=OptimConfig(learning_rate=2e-3),
                     train=TrainConfig(**{'max_steps': 150, 'save_strategy': 'no', 'progress': False} | train))


@pytest.fixture(scope='module')
def tuned(home):
    return run(config(home, 'tuned'), verbose=False)


def test_it_learns_what_it_was_not_shown(tuned):
    assert tuned.metrics['base_exact_match'] == 0
    assert tuned.metrics['exact_match'] > 0.6, tuned.metrics
    report = tuned.report.read_text()
    for part in ('Held-out questions', 'Answers', 'what is learned is dark', 'base', 'tuned'): assert part in report, part


def test_the_test_part_is_set_apart(tuned, home):
    asked = {json.loads(line)['prompt'] for line in (tuned.folder/'test.jsonl').read_text().splitlines()}
    everything = {json.loads(line)['prompt'] for line in (home/'pairs.jsonl').read_text().splitlines()}
    assert asked and asked < everything
    log = (tuned.folder/'log.txt').read_text()
    assert 'for a test that this run does not read' in log


def test_the_folder_opens_in_transformers_and_its_answers_stop(tuned):
    code = ("import sys, json\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "m, t = (c.from_pretrained(sys.argv[1]) for c in (AutoModelForCausalLM, AutoTokenizer))\n"
            "out = []\n"
            "for q in json.loads(sys.argv[2]):\n"
            "    ids = t.apply_chat_template([dict(role='user', content=q)], add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
            "    new = m.generate(**ids, max_new_tokens=40, do_sample=False)[0][ids['input_ids'].shape[1]:]\n"
            "    out.append([t.decode(new, skip_special_tokens=True).strip(), int(new[-1]) == t.eos_token_id, len(new)])\n"
            "print(json.dumps([out, t.eos_token, m.generation_config.eos_token_id == t.eos_token_id, 'trainkit' in sys.modules]))")
    questions = ['Spell 3.', 'What is 7 in words?', 'Name the number 11.']
    done = subprocess.run([sys.executable, '-c', code, str(tuned.model_path), json.dumps(questions)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers, eos, same, ours = json.loads(done.stdout.splitlines()[-1])
    assert (eos, same, ours) == ('<|im_end|>', True, False)
    assert all(stopped for _, stopped, _ in answers), answers
    assert sum(answer == name for (answer, *_), name in zip(answers, ('three', 'seven', 'eleven'), strict=True)) >= 2, answers


def test_packed_and_unpacked_begin_with_the_same_loss(home):
    "All rows in one batch: the first loss does not depend on how they share rows."
    losses = [run(config(home, f'one-{packing}', packing, max_steps=1, per_device_train_batch_size=80), verbose=False).final_loss
              for packing in ('none', 'greedy', 'first_fit', 'best_fit')]
    assert all(abs(loss - losses[0]) < 1e-5 for loss in losses), losses


def test_stopped_and_resumed_it_ends_the_same(home):
    class StopAt:
        def on_step(self, trainer, record):
            if trainer.state.step == 7: trainer.control.stop('interrupted')
    whole, half = (config(home, name, max_steps=12, save_strategy='steps') for name in ('whole', 'half'))
    expected = run(whole, verbose=False)
    run(half, callbacks=[StopAt()], verbose=False)
    resumed = run(half, resume=True, verbose=False)
    assert resumed.metrics == expected.metrics and resumed.final_loss == expected.final_loss


@pytest.mark.parametrize('rows, hint', [
    ([dict(prompt='Say it.', completion='x'*300)]*3 + [dict(prompt=f'Say {n}.', completion='y') for n in range(9)], 'longer than max_length'),
    ([dict(prompt='a', completion='b')], "can't be split"),
])
def test_rows_that_cannot_be_learned_stop_before_the_first_step(home, rows, hint):
    (home/'bad.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    bad = config(home, 'bad')
    bad.data.path = str(home/'bad.jsonl')
    with pytest.raises(ValueError, match=hint): run(bad, verbose=False)
    assert not (home/'runs'/'bad').exists()


def test_the_same_from_a_shell(home):
    words = ['train', '--method', 'sft', '--model', 'runs/base/model', '--dataset', 'pairs.jsonl', 'name=shell', 'optim.learning_rate=2e-3',
             'train.max_steps=20', 'data.eval_fraction=0.2', 'train.save_strategy=no']
    done = shell(*words, cwd=home, TRAINKIT_PROFILE='quick')
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ('examples of kind prompt_completion', 'of them learned', 'right to the letter', 'report.html'):
        assert part in done.stdout, done.stdout
    said = Path(home/'runs'/'shell'/'config.yaml').read_text()
    assert 'per_device_train_batch_size: 8' in said and 'learning_rate: 0.002' in said
