"The shell where something comes between: a wrong value, Ctrl-C, a pipe that closes; and what programs read of it."
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, command, in_child
from conftest import shell as trainkit

POSIX = pytest.mark.skipif(os.name == 'nt', reason='needs POSIX signals')


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A model that was taught nothing, with a chat format, and rows."
    import torch

    from trainkit.chat import set_template
    from trainkit.hf import save_pretrained
    from trainkit.model import ModelConfig, Transformer
    from trainkit.tokenizer import BPETokenizer
    folder = tmp_path_factory.mktemp('shell')
    rows = [dict(prompt=f'Spell {n}.', completion=word) for n, word in enumerate('zero one two three four five six seven eight nine'.split()*3)]
    (folder/'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    tokenizer = BPETokenizer.train([row['prompt'] + row['completion'] for row in rows], 280, special_tokens=['<|endoftext|>'], progress=False)
    set_template(tokenizer, 'chatml')
    torch.manual_seed(0)
    save_pretrained(Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=256)), tokenizer, folder/'model')
    return folder


def test_a_wrong_value_is_named(tmp_path):
    for words in (['generate', '-m', 'x', '-p', 'y', '--max-new-tokens', 'lots'], ['data', 'show', 'x', '-n', 'lots'], ['train', '--profile', 'lots']):
        done = trainkit(*words, cwd=tmp_path)
        assert done.returncode == 2 and "'lots'" in done.stderr and words[-2] in done.stderr, done.stderr


def test_a_wrong_knob_is_found_before_anything_is_said(home):
    for wrong, hint in ((['--top-p', '2'], 'top_p = 2'), (['--stop', ''], "stop holds ''")):
        done = trainkit('generate', '-m', 'model', '-p', 'Spell', *wrong, cwd=home)
        assert (done.returncode, done.stdout) == (1, '') and hint in done.stderr, done.stderr


def pressed(words, cwd, env, what, person=False):
    "The command, which gets a Ctrl-C in the middle of its first answer, or of its writing."
    from trainkit import containers, generate, talk
    stream, write, calls = generate.stream, containers.write_atomic, []
    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    def answer(*args, **knobs):
        calls.append(args)
        for piece in stream(*args, **knobs):
            yield piece
            if len(calls) == 1: press()
    if what == 'write': containers.write_atomic = lambda path, data: (press(), write(path, data))
    else: generate.stream = talk.stream = answer
    sys.stdin = io.StringIO('Spell 1.\nSpell 2.\n/exit\n')
    sys.stdin.isatty = lambda: person
    return command(words, cwd, env)


@POSIX
@pytest.mark.parametrize('person', [True, False])
def test_ctrl_c_ends_an_answer(home, tmp_path, person):
    "At a terminal the chat goes on with the next question; elsewhere the program ends."
    words = ['chat', '-m', str(home/'model'), '--max-new-tokens', '9', '--seed', '1']
    done = in_child(pressed, words, tmp_path, {}, 'answer', person, folder=tmp_path)
    assert done.returncode == (0 if person else 130) and 'Traceback' not in done.stderr, done.stderr
    assert done.stdout and done.stderr.count('> ') == 3*person


@POSIX
def test_ctrl_c_ends_a_text(home, tmp_path):
    done = in_child(pressed, ['generate', '-m', str(home/'model'), '-p', 'Spell', '--max-new-tokens', '9'], tmp_path, {}, 'answer', folder=tmp_path)
    assert (done.returncode, done.stderr, done.stdout[:5], done.stdout[-1]) == (130, '', 'Spell', '\n')


@POSIX
def test_ctrl_c_leaves_no_half_file(home, tmp_path):
    words = ['data', 'pack', str(home/'rows.jsonl'), 'out.jsonl', '--max-length', '64', '--tokenizer', str(home/'model')]
    done = in_child(pressed, words, tmp_path, {}, 'write', folder=tmp_path)
    assert (done.returncode, done.stderr) == (130, '') and {p.name for p in tmp_path.iterdir()} == {'out.txt', 'err.txt'}


def test_a_pipe_that_closes_early_is_no_error(home):
    for words in (['tokenizer', 'encode', 'model', 'x '*40_000], ['generate', '-m', 'model', '-p', 'Spell', '--max-new-tokens', '200'], ['data', 'show', 'rows.jsonl', '-n', '30']):
        with subprocess.Popen([sys.executable, '-m', 'trainkit', *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home,
                              env={**os.environ, 'PYTHONPATH': str(ROOT)}) as done:
            assert done.stdout and done.stderr and done.stdout.read(1)
            done.stdout.close()
            assert done.stderr.read() == '', words


@pytest.mark.slow
def test_programs_read_json_and_nothing_else(home, tmp_path):
    "Each command with --json."
    (tmp_path/'theirs.yaml').write_text('base_model: x\nadapter: lora\nmicro_batch_size: 2\n')
    model, rows = str(home/'model'), str(home/'rows.jsonl')
    train = ['train', '--method', 'sft', '-m', model, '--dataset', rows, 'train.max_steps=2', 'train.sample_steps=0', 'sft.questions=2', 'data.max_length=64']
    for words in ([*train, 'name=a'], [*train, 'name=b', 'optim.learning_rate=1e-3'], [*train, '--dry-run'], ['runs', 'list'], ['runs', 'compare', 'a', 'b'], ['runs', 'show', 'a'],
                  ['runs', 'health', 'a'], ['eval', 'runs/a/model', rows, '--base', model, '--rows', '4', '--answers', '2'], ['config', 'show'], ['config', 'presets'], ['config', 'convert', 'theirs.yaml'],
                  ['tokenizer', 'show', model], ['tokenizer', 'encode', model, 'Spell'], ['doctor'], ['memory', 'predict', '-m', model], ['memory', 'plan', '-m', model, '--budget', '1 GB'], ['data', 'check', rows]):
        done = trainkit(*words, '--json', cwd=tmp_path)
        json.loads(done.stdout)
        assert done.returncode in (0, 1) and 'Traceback' not in done.stderr, (words, done.stderr)
