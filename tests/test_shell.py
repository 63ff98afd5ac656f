"The shell where something comes between: a wrong value, Ctrl-C, a pipe that closes; and what programs read of it."
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, call, command, in_child
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


DAMAGED = { # what is done to a model's folder -> the command, and what it says
    'config.json is a list': (lambda m: (m/'config.json').write_text('[]'), ['generate', '-m', 'M', '-p', 'x'], 'config.json holds a list'),
    'tokenizer.json cut short': (lambda m: (m/'tokenizer.json').write_text('{"model": {'), ['generate', '-m', 'M', '-p', 'x'], 'copy or save its tokenizer.json again'),
    'tokenizer.json is empty': (lambda m: (m/'tokenizer.json').write_text('{}'), ['generate', '-m', 'M', '-p', 'x'], 'copy or save its tokenizer.json again'),
    'no tokenizer.json': (lambda m: (m/'tokenizer.json').unlink(), ['generate', '-m', 'M', '-p', 'x'], 'copy or save its tokenizer.json again'),
    'a tokenizer cut short': (lambda m: (m/'tokenizer.json').write_text('{"model": {'), ['data', 'tokenize', 'rows.jsonl', 'out', '--tokenizer', 'M'], 'tokenizer.json'),
    'a tokenizer that is empty': (lambda m: (m/'tokenizer.json').write_text('{}'), ['data', 'pack', 'rows.jsonl', '--tokenizer', 'M'], 'tokenizer.json'),
    'NaN among the weights': ('nan', ['generate', '-m', 'M', '-p', 'x'], 'the weights hold NaN'),
    'NaN, when it is judged': ('nan', ['eval', 'M', 'rows.jsonl', '--rows', '2', '--answers', '1'], 'NaN'),
    'an empty GGUF file': (lambda m: (m/'m.gguf').write_bytes(b''), ['generate', '-m', 'M/m.gguf', '-p', 'x'], 'm.gguf is empty'),
    'GGUF of what is cut short': (lambda m: os.truncate(m/'model.safetensors', 9000), ['export', 'gguf', 'M', 'out.gguf'], 'model.safetensors is damaged or cut short'),
    'GGUF of NaN': ('nan', ['export', 'gguf', 'M', 'out.gguf', '--type', 'q8_0'], 'holds NaN or Inf in '),
    'a folder where a file is': (lambda m: None, ['lab', 'rows.jsonl', '--copy-only'], 'rows.jsonl: File exists'),
    'a config that is not UTF-8': (lambda m: (m/'c.yaml').write_bytes(b'name: sch\xf6n'), ['launch', 'M/c.yaml', '--dry-run'], 'c.yaml is not UTF-8'),
    'a run that logged nothing': (lambda m: ((m/'metrics.jsonl').write_text(''), (m/'config.yaml').write_text('name: M')), ['runs', 'health', 'M'], 'M has logged no step'),
    'base cut short': (lambda m: os.truncate(m/'model.safetensors', 9000), ['merge', 'M', 'adapter', 'out'], 'model.safetensors is damaged or cut short'),
    'adapter of another shape': (lambda m: None, ['merge', 'M', 'adapter', 'out'], 'is it the right base model?'),
}


@pytest.mark.parametrize('case', DAMAGED)
def test_a_damaged_model_is_one_sentence_that_names_the_file(case, home, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file
    harm, words, hint = DAMAGED[case]
    shutil.copytree(home/'model', tmp_path/'M')
    shutil.copy(home/'rows.jsonl', tmp_path)
    if 'merge' in words:
        (tmp_path/'adapter').mkdir()
        save_file({f'base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight': torch.zeros(shape) for x, shape in (('A', (2, 16)), ('B', (32, 2)))}, tmp_path/'adapter'/'adapter_model.safetensors')
        (tmp_path/'adapter'/'adapter_config.json').write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}')
    if harm == 'nan': save_file({name: t*torch.nan for name, t in load_file(tmp_path/'M'/'model.safetensors').items()}, tmp_path/'M'/'model.safetensors', {'format': 'pt'})
    else: harm(tmp_path/'M')
    before = {*os.listdir(tmp_path)}
    done = call(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, '') and hint in done.stderr and 'Traceback' not in done.stderr, done.stdout + done.stderr
    assert done.stderr.count('\n') == 2 and {*os.listdir(tmp_path)} == before, done.stderr


def test_an_encoding_that_nobody_knows_and_a_link_to_nowhere(home):
    for name in ('gone.jsonl',):
        if not (home/name).is_symlink(): (home/name).symlink_to('nowhere')
    for words, hint in ((['data', 'show', 'rows.jsonl', '--encoding', 'utf-99'], "encoding = 'utf-99' is not known"), (['data', 'show', 'gone.jsonl'], 'a link to nowhere')):
        done = call(*words, cwd=home)
        assert done.returncode == 1 and hint in done.stderr, done.stderr


def test_a_small_file_is_not_0_mb(home, tmp_path):
    (tmp_path/'text.txt').write_text('Spell zero and one. '*100)
    done = trainkit('data', 'tokenize', 'text.txt', 'out', '--tokenizer', home/'model', cwd=tmp_path)
    assert done.returncode == 0 and '2/2 kB' in done.stderr, done.stderr


def test_a_warning_is_a_line_without_source_code(tmp_path):
    (tmp_path/'c.yaml').write_text('use_wandb: true\n')
    done = trainkit('config', 'show', 'c.yaml', cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith('Warning: use_wandb') and done.stderr.count('\n') == 1, done.stderr


def test_what_a_run_notes_is_not_in_its_json(home, tmp_path):
    "Going on with other data or knobs is noted aloud, and a program still reads one JSON value."
    train = ['train', '--method', 'sft', '-m', home/'model', '--dataset', home/'rows.jsonl', 'train.sample_steps=0', 'train.eval_strategy=no', 'sft.questions=0', 'data.max_length=64', 'watch_memory=false', 'name=a']
    first = call(*train, 'train.max_steps=2', '--json', cwd=tmp_path)
    assert json.loads(first.stdout)['steps'] == 2, first.stderr
    more = call('train', '--resume', 'runs/a', '--force-resume', 'optim.learning_rate=0.5', 'train.max_steps=3', '--json', cwd=tmp_path)
    assert json.loads(more.stdout)['steps'] == 3 and 'because you asked for it' in more.stderr, more.stdout + more.stderr


@pytest.mark.parametrize('colour', [True, False])
def test_no_color_is_heard(colour, tmp_path, monkeypatch):
    "Also by what is said of an error in a terminal (no-color.org)."
    from trainkit.cli import main
    monkeypatch.setenv('NO_COLOR', '' if colour else '1')
    monkeypatch.setattr(sys, 'argv', ['trainkit', 'train', str(tmp_path/'nowhere.yaml')])
    monkeypatch.setattr(sys, 'stderr', screen := io.StringIO())
    screen.isatty = lambda: True
    with pytest.raises(SystemExit): main()
    assert 'nowhere.yaml' in screen.getvalue() and ('\x1b[31m' in screen.getvalue()) == colour, screen.getvalue()


def closed(words, cwd, env):
    sys.stdin = None # as Python has it where the shell closed it
    return command(words, cwd, env)


def test_no_standard_input_is_an_empty_one(home, tmp_path):
    done = in_child(closed, ['generate', '-m', str(home/'model')], tmp_path, {}, folder=tmp_path)
    assert done.returncode == 2 and 'nothing to go on from' in done.stderr, done.stderr


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


RUDE = 'red \x1b[31m title \x1b]0;owned\x07 back\rover \x9b2J \u202egnp.exe'
KIND = 'red ⟨1B⟩[31m title ⟨1B⟩]0;owned⟨07⟩ back⟨0D⟩over ⟨9B⟩2J ⟨202E⟩gnp.exe'


def no_controls(text: str) -> bool:
    import re
    return not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]', text)


def test_data_and_prompts_do_nothing_in_a_terminal(home, tmp_path):
    file = tmp_path/'ro\x1b[31mws.jsonl'
    file.write_text('\n'.join(json.dumps(row) for row in [dict(prompt=RUDE, completion=f'{RUDE} {n}') for n in range(4)] + [dict(prompt=RUDE, answer=RUDE)]))
    model = str(home/'model')
    for words, seen in ((['data', 'show', file], KIND[:20]), (['data', 'check', file], '1B'), (['data', 'check', file, '--json'], ''),
                        (['generate', '-m', model, '-p', RUDE, '--max-new-tokens', '3'], KIND), (['generate', '-m', RUDE, '-p', 'x'], '⟨1B⟩'),
                        (['tokenizer', 'encode', model, '--text', RUDE], ''), (['data', 'show', str(file) + '\x1b[2J'], '⟨1B⟩')):
        done = call(*words, cwd=tmp_path, NO_COLOR='1')
        assert no_controls(done.stdout + done.stderr), (words, done.stdout, done.stderr)
        assert seen in done.stdout + done.stderr, (words, done.stdout, done.stderr)
        if '--json' in words: json.loads(done.stdout)


def test_prompts_and_answers_do_nothing_in_a_log(tmp_path, capsys):
    import io

    from trainkit.progress import Progress
    from trainkit.runs import RunFolder
    from trainkit.track import MetricsLog
    folder = RunFolder(tmp_path/'run')
    log = MetricsLog(folder, console=True)
    log.say(f'a sample: {RUDE}')
    folder.log(RUDE)
    shown = capsys.readouterr().out + (folder.path/'log.txt').read_text(encoding='utf-8')
    assert no_controls(shown) and shown.count(KIND) == 3
    for where in ('lines', 'terminal'):
        file = io.StringIO()
        with Progress(10, RUDE, where=where, file=file) as bar:
            bar.update(1, said=RUDE)
            said = bar.status() + ''.join(part for part, _ in bar.parts(400))
            if where == 'lines': bar.screen.refresh(bar)
        assert no_controls(said) and KIND in said
        if where == 'lines': assert no_controls(file.getvalue()) and KIND in file.getvalue()
