"Files of every format, with every kind of damage, to rows that can be trusted; splits that stay; mixtures and caches."
import gzip
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.columns import KINDS, as_example, example_kind, to_messages
from trainkit.containers import read_rows
from trainkit.cuts import side, split_examples, split_key
from trainkit.damage import clean_examples, clean_text
from trainkit.dataset import DataConfig, load_examples, load_splits, stream_examples, write_examples
from trainkit.memo import cached
from trainkit.mixture import mix

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FORMATS = ('jsonl', 'json', 'csv', 'tsv', 'parquet', 'jsonl.gz', 'json.gz', 'csv.gz')


# --- what is written is read again, in every format and of every kind

text = st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=30).filter(lambda t: t.strip() and not t.startswith('[{'))
turns = st.builds(lambda u, a, s: [*([dict(role='system', content=s)] if s else []), dict(role='user', content=u),
                                   dict(role='assistant', content=a)], text, text, st.none() | text)
ROWS = {
    'text': st.fixed_dictionaries(dict(text=text)),
    'messages': st.fixed_dictionaries(dict(messages=turns)),
    'preference': st.fixed_dictionaries(dict(prompt=text, chosen=text, rejected=text)),
    'unpaired': st.fixed_dictionaries(dict(prompt=text, completion=text, label=st.booleans())),
    'reasoning': st.fixed_dictionaries(dict(question=text, reasoning=text, answer=text)),
    'instruction': st.fixed_dictionaries(dict(instruction=text, input=st.just('') | text, output=text)),
    'prompt_completion': st.fixed_dictionaries(dict(prompt=text, completion=text)),
    'prompt': st.fixed_dictionaries(dict(prompt=text)),
}


@pytest.mark.parametrize('form', FORMATS)
@pytest.mark.parametrize('kind', KINDS)
@FUZZ
@given(data=st.data())
def test_round_trip(tmp_path, kind, form, data):
    rows = data.draw(st.lists(ROWS[kind], min_size=1, max_size=5))
    path = write_examples(rows, tmp_path/f'rows.{form}')
    back = load_examples(path)
    assert back.report.kind == kind
    assert [{k: v for k, v in row.items() if k not in ('source', 'line')} for row in back] == rows


@pytest.mark.parametrize('form', ['jsonl', 'json', 'csv', 'tsv'])
@FUZZ
@given(rows=st.lists(ROWS['prompt_completion'], min_size=1, max_size=6))
def test_line_numbers_are_those_of_the_file(tmp_path, form, rows):
    path = write_examples(rows, tmp_path/f'rows.{form}')
    raw = path.read_bytes().decode()
    if form in ('csv', 'tsv'): # a record must begin on its line: what comes before is the header and the rows before
        for i, row in enumerate(load_examples(path)):
            before = write_examples(rows[:i], tmp_path/f'before.{form}').read_bytes().decode() if i else 'prompt,completion\r\n'
            assert row['line'] == len(before.replace('\r\n', '\n').replace('\r', '\n').split('\n'))
    else:
        lines = raw.split('\n')
        for row in load_examples(path): assert lines[row['line'] - 1].strip().startswith('{')
        numbers = [row['line'] for row in load_examples(path)]
        assert numbers == [i for i, line in enumerate(lines, 1) if line.strip().startswith('{')]


# --- seeded bad rows: each is found, on its line, and nothing else is

GOOD = [dict(prompt=f'Question {i},\n"so"?', completion=f'Answer; {i}') for i in range(40)]
BAD = { # what is wrong -> the row, and what must be said of it
    'empty': (dict(prompt='x', completion=' '), 'completion is empty'),
    'type': (dict(prompt='x', completion=5), 'completion = 5 is of type int'),
    'missing': (dict(prompt='x', completon='y'), "Did you mean 'completon'"),
    'role': (dict(prompt=[dict(role='usr', content='x')], completion='y'), "unknown role 'usr'"),
    'nested': (dict(prompt=dict(a=1), completion='y'), "no 'role'"),
    'half': (dict(prompt='x', completion='cut \ud83d'), 'surrogates'),
    'list': (['x', 'y'], 'must be an object'),
}


def seeded(seed, names):
    rng = random.Random(seed)
    rows, wrong = [*GOOD], {}
    for name in names: rows.insert(rng.randint(1, len(rows)), BAD[name][0])
    for i, row in enumerate(rows):
        for name in names:
            if row is BAD[name][0]: wrong[i] = name
    return rows, wrong


def load_skipping(path, **options):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        rows = load_examples(path, on_bad='skip', **options)
    assert bool(said) == bool(rows.report.bad), 'what is left out must be said'
    return rows


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('form', ['jsonl', 'json', 'jsonl.gz'])
def test_bad_rows_in_json(tmp_path, form, seed):
    rows, wrong = seeded(seed, BAD)
    dump = [json.dumps(row) for row in rows]
    if form.startswith('jsonl'):
        wrong[len(dump)] = 'syntax'
        dump.append('{"prompt": "x" "completion": "y"}')
        data, where = '\n'.join(dump) + '\n', {i + 1: name for i, name in wrong.items()}
    else: data, where = '[\n' + ',\n'.join(dump) + '\n]', {i + 2: name for i, name in wrong.items()}
    path = tmp_path/f'rows.{form}'
    path.write_bytes(gzip.compress(data.encode()) if form.endswith('gz') else data.encode())
    back = load_skipping(path)
    assert [(r['prompt'], r['completion']) for r in back] == [(r['prompt'], r['completion']) for r in GOOD]
    assert len(back.report.bad) == len(where)
    for said, (line, name) in zip(back.report.bad, sorted(where.items()), strict=True):
        assert f'{path}, line {line}' in said
        assert BAD[name][1] in said if name in BAD else 'column 16: not JSON' in said
    first = min(where)
    with pytest.raises(ValueError, match=f'line {first}'): load_examples(path)


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('form', ['csv', 'tsv'])
def test_bad_rows_in_tables(tmp_path, form, seed):
    path, rng, mark = tmp_path/f'rows.{form}', random.Random(seed), ',' if form == 'csv' else '\t'
    records = [f'"Question {i}{mark}\nso?"{mark}Answer {i}\n' for i in range(30)]
    for bad in ('alone\n', f'x{mark}y{mark}z\n', f'"x" y{mark}z\n', f'x{mark}\n'): records.insert(rng.randint(20, len(records)), bad)
    path.write_text('prompt' + mark + 'completion\n' + ''.join(records))
    back, line, expected = load_skipping(path), 2, []
    for record in records:
        if not record.startswith('"Q'): expected.append(line)
        line += record.count('\n')
    assert len(back) == 30
    assert [int(said.split('line ')[1].split(':')[0].split(' ')[0]) for said in back.report.bad] == expected


def test_bad_rows_in_parquet(tmp_path):
    rows = [dict(prompt=f'q{i}', completion=None if i in (3, 17) else ' ' if i == 8 else 'a') for i in range(20)]
    back = load_skipping(write_examples(rows, tmp_path/'rows.parquet'))
    assert len(back) == 17
    assert [said.split(': ')[0].split('line ')[1] for said in back.report.bad] == ['4', '9', '18']
    assert [r['line'] for r in back] == [i + 1 for i in range(20) if i not in (3, 8, 17)]


@pytest.mark.parametrize('form', ['jsonl', 'json', 'csv', 'parquet', 'jsonl.gz', 'csv.gz'])
def test_a_file_cut_anywhere_is_no_shorter_list_in_silence(tmp_path, form):
    path = write_examples(GOOD, tmp_path/f'rows.{form}')
    whole, rng = path.read_bytes(), random.Random(0)
    ends = {0} # where a cut leaves whole rows only, which no reader can notice
    if form in ('jsonl', 'csv'):
        for i in range(len(GOOD) + 1):
            ends.add(len(write_examples(GOOD[:i], tmp_path/f'part.{form}').read_bytes()) if i else len('prompt,completion\r\n'))
    for cut in rng.sample(range(1, len(whole) - 1), 60):
        if any(abs(cut - end) <= 2 for end in ends): continue
        path.write_bytes(whole[:cut])
        try: back = load_examples(path)
        except ValueError: continue
        # an unquoted last field may end early in a CSV file: the row is there, only shorter
        assert form == 'csv' and [r['prompt'] for r in back] == [r['prompt'] for r in GOOD[:len(back)]], cut


def test_a_zst_file_without_its_end_is_an_error(tmp_path):
    import zstandard
    plain = write_examples(GOOD*50, tmp_path/'rows.jsonl').read_bytes()
    path = tmp_path/'rows.jsonl.zst'
    path.write_bytes(packed := zstandard.compress(plain))
    assert len(load_examples(path)) == len(GOOD)*50
    for cut in (1, 20, len(packed)//2, len(packed) - 1):
        path.write_bytes(packed[:cut])
        with pytest.raises(ValueError, match='not a whole .zst'): [*read_rows(path)]


def test_workers_change_nothing(tmp_path):
    rows, _ = seeded(1, [name for name in BAD if name != 'list'])
    path = tmp_path/'rows.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows*20))
    one, many = load_skipping(path), load_skipping(path, num_workers=2)
    assert one == many and one.report == many.report
    assert clean_examples(one) == clean_examples(one, num_workers=2)
    with pytest.raises(ValueError) as first: load_examples(path)
    with pytest.raises(ValueError) as again: load_examples(path, num_workers=2)
    assert str(first.value) == str(again.value)


def test_a_stream_reads_only_what_is_asked(tmp_path):
    path = tmp_path/'rows.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in GOOD) + 'broken\n')
    assert [r['line'] for r in stream_examples(path, max_examples=3)] == [1, 2, 3]
    assert len(load_examples(path, max_examples=40)) == 40
    with pytest.raises(ValueError, match='line 41'): load_examples(path)


# --- Hugging Face datasets

def test_hub_options_reach_datasets(monkeypatch):
    import datasets
    asked = []
    def fake(name, config, split=None, streaming=False):
        asked.append((name, config, split, streaming))
        return {'train': [dict(text='a')], 'validation': [dict(text='b')]} if split is None else [dict(text='c')]
    monkeypatch.setattr(datasets, 'load_dataset', fake)
    rows = load_examples('Salesforce/wikitext', dataset_config='wikitext-2-v1')
    assert [r['text'] for r in rows] == ['a'] and rows.report.notes == ['splits: train, validation; read: train']
    assert load_examples('Salesforce/wikitext', split='eval')[0]['text'] == 'b'
    assert next(iter(stream_examples('Salesforce/wikitext', split='train[:10%]')))['text'] == 'c'
    assert asked == [('Salesforce/wikitext', 'wikitext-2-v1', None, False), ('Salesforce/wikitext', None, None, False),
                     ('Salesforce/wikitext', None, 'train[:10%]', True)]
    parts, facts = load_splits(DataConfig(path='Salesforce/wikitext', validation_split='validation'))
    assert [r['text'] for r in parts['eval']] == ['b'] and facts['train_rows'] == 1


def test_offline_is_a_sentence():
    code = ("from trainkit.dataset import load_examples\ntry: load_examples('no-such-owner/no-such-data')\n"
            "except ConnectionError as error: print(error)")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    assert "is not on this machine, and Hugging Face can't be reached" in done.stdout, done.stderr


# --- splits

HELD_OUT = [4, 9, 10, 11, 12, 13, 14, 18]


def test_split_vectors():
    "The published places: whoever splits elsewhere, in whatever language, must get these."
    assert [side(t) for t in ('trainkit', '', 'Why is the sky blue?', 'déjà vu', '日本語')] == [
        0.6157926122048922, 0.5151522356031434, 0.9258451515712119, 0.4148602243291247, 0.6995804607646476]
    questions = [dict(prompt=f'Question {n}', completion='a') for n in range(20)]
    assert [n for n, row in enumerate(questions) if row in split_examples(questions, 0.2)[1]] == HELD_OUT
    assert [side('trainkit', seed) for seed in (0, 1)] == [0.6157926122048922, 0.9973750967943643]


def test_splits_do_not_depend_on_the_process():
    code = ("import json\nfrom trainkit.dataset import load_examples, split_examples\n"
            "parts = split_examples(load_examples('arithmetic', max_examples=200), 0.1, 3, 0.1, by='source')\n"
            "print(json.dumps([[r['question'] for r in part] for part in parts]))")
    outs = {subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                           env={**os.environ, 'PYTHONHASHSEED': seed}).stdout for seed in ('0', '1')}
    assert len(outs) == 1


keys = st.lists(st.integers(0, 10**6), min_size=30, max_size=120, unique=True)


@FUZZ
@given(old=keys, new=keys, seed=st.integers(0, 5))
def test_adding_rows_moves_none(old, new, seed):
    rows = lambda numbers: [dict(prompt=f'Question {n}', completion=str(n)) for n in numbers]
    before, after = (split_examples(rows(n), 0.3, seed, 0.3) for n in (old, [*new, *old]))
    if any(side(split_key(r), seed) < 0.3 for r in before[1]) and any(side(split_key(r), seed) >= 0.7 for r in before[2]):
        for part, later in zip(before, after, strict=True):
            assert all(row in later for row in part)


@FUZZ
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 3))
def test_no_question_on_two_sides(data, kind, seed):
    rows = data.draw(st.lists(ROWS[kind], min_size=8, max_size=20))
    rows = [dict(row, task=str(i % 3)) for i, row in enumerate(rows + rows[::2])]
    if len({split_key(r) for r in rows}) < 6: return
    try: parts = split_examples(rows, 0.3, seed, 0.2, by='task')
    except ValueError as error:
        assert 'nothing to train on' in str(error)
        return
    sets = [{split_key(r) for r in part} for part in parts]
    assert sum(map(len, sets)) == len(set.union(*sets)) and sum(map(len, parts)) == len(rows)


@FUZZ
@given(st.text(max_size=60) | st.text('ae\u0301\u200b\r\n\x85\u2029 \u00a0', max_size=20))
def test_cleaning_twice_is_cleaning_once(dirty):
    once = clean_text(dirty)
    assert clean_text(once) == once
    assert '\r' not in once and '\u200b' not in once and '\n\n\n\n' not in once


@pytest.mark.parametrize('kind', KINDS)
def test_cleaning_reaches_every_text(kind):
    dirty = dict(text='a\x00\r\nb', messages=[dict(role='user', content='a\x00\r\nb'), dict(role='assistant', content='a\x00\r\nb')])
    row = {c: dirty['messages'] if c == 'messages' else True if c == 'label' else dirty['text'] for c in KINDS[kind]}
    (clean,), counts = clean_examples([row])
    assert '\\x00' not in repr(clean) and '\\r' not in repr(clean) and counts['changed'] == 1


def test_prepared_parts_share_nothing(tmp_path):
    rows = [dict(prompt=f'Question  {i % 70}' + '\u200b'*(i % 2), completion=f'{i}', task='ab'[i % 2]) for i in range(300)]
    path = write_examples(rows, tmp_path/'rows.jsonl')
    parts, facts = load_splits(DataConfig(path=str(path), eval_fraction=0.1, test_fraction=0.1, split_by='task'))
    assert facts['shared'] == 0 and facts['train_rows'] + facts['eval_rows'] + facts['test_rows'] == 300
    assert all({r['task'] for r in part} == {'a', 'b'} for part in (parts['train'], parts['eval']))


# --- conversations, mixtures, caches

@pytest.mark.parametrize('kind', ['messages', 'reasoning', 'instruction', 'prompt_completion'])
@FUZZ
@given(data=st.data())
def test_messages_end_with_the_answer(kind, data):
    row = data.draw(ROWS[kind])
    said = to_messages(row)
    assert [m['role'] for m in said][-2:] == ['user', 'assistant']
    answer = row['messages'][-1]['content'] if kind == 'messages' else row[KINDS[kind][-1]]
    assert said[-1]['content'].endswith(answer)
    assert example_kind(as_example(row)) == kind and as_example(as_example(row)) == as_example(row)


@FUZZ
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), total=st.integers(0, 200), temperature=st.sampled_from([1, 2, 10.]))
def test_mixtures_are_exact_and_fair(sizes, total, temperature):
    data = {f't{i}': [dict(text=f'{i}/{j}') for j in range(n)] for i, n in enumerate(sizes)}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rows = mix(data, temperature=temperature, total=total)
    assert len(rows) == total
    for name, own in data.items():
        used = [r['text'] for r in rows if r['task'] == name]
        assert len(used) == rows.report.parts[name]['used']
        times = {sum(u == r['text'] for u in used) for r in own}
        assert max(times) - min(times) <= 1, 'a row comes again only when all others have come'


def test_cache_is_shared_by_processes(tmp_path):
    code = f"""
from trainkit.memo import cached
def make(): open({str(tmp_path/'calls')!r}, 'a').write('x'); return [dict(input_ids=[1, 2], labels=[-100, 2])]
print([e['labels'].tolist() for e in cached(make, [dict(a=1.5, b=None), 'v1'], {str(tmp_path/'cache')!r})])"""
    outs = [subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                           env={**os.environ, 'PYTHONHASHSEED': seed}).stdout for seed in '01']
    assert outs == ['[[-100, 2]]\n']*2 and (tmp_path/'calls').read_text() == 'x'


def test_cache_misses_when_anything_changes(tmp_path):
    calls = []
    def make(): calls.append(1); return [dict(input_ids=[1])]
    rows = [dict(prompt='a', completion='b'), dict(prompt='c', completion='d')]
    for depends in ([rows, 1], [rows, 2], [rows[::-1], 1], [rows[:1], 1], [rows, '1'], [rows, 1]): cached(make, depends, tmp_path)
    assert len(calls) == 5 and len(list(Path(tmp_path).iterdir())) == 5


def test_every_reader_gives_lines_from_one(tmp_path):
    for form in ('jsonl', 'json', 'csv', 'tsv', 'parquet', 'txt'):
        path = tmp_path/f'rows.{form}'
        if form == 'txt': path.write_text('text\n')
        else: write_examples([dict(text='one'), dict(text='two')], path)
        lines = [line for line, _ in read_rows(path)]
        assert lines == {'txt': [1], 'csv': [2, 3], 'tsv': [2, 3], 'json': [2, 5]}.get(form, [1, 2])
