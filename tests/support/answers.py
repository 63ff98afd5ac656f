"""Other answers to exercises than the folded solution: right ones in another form, and mistakes.

For each lesson: the number of the exercise, whether its check should say `right`, and the answer.
"""

ANSWERS: dict[str, list[tuple[int, bool, str]]] = {
    "01_tokenizer/02_word_counts": [
        (1, True, "once = round(sum(n == 1 for n in counts.values())/len(counts), 2)"),
        (1, False, "once = sum(n == 1 for n in counts.values())/sum(counts.values())"),
        (2, True, "wrong = [w for w in halves | counts if halves[w] != counts[w]]"),
        (2, False, "wrong = 3*[next(w for w in halves | counts if halves[w] != counts[w])]"),
    ],
    "01_tokenizer/03_bpe": [
        (2, True, "lengths = (2, 4, 8, 16)"),
        (2, False, "lengths = list(range(2, 17))"),
    ],
    "01_tokenizer/04_encoding": [
        (2, True, "share = round(1 - len(fresh.words)/len(split_words(source)), 2)"),
        (2, False, "share = len(fresh.words)/len(split_words(source))"),
    ],
    "01_tokenizer/05_file_formats": [
        (
            3,
            False,
            "single = Tokenizer.from_str(json.dumps(tokenizer_json(**parts | dict(pattern=r'.'))))",
        ),
    ],
    "01_tokenizer/06_tokenizer": [
        (
            2,
            True,
            "sizes = tuple(len(BPETokenizer.train(source, n).encode(source)) "
            "for n in (300, 600, 1200))",
        ),
        (2, False, "sizes = [3, 1, 0]"),
    ],
    "01_tokenizer/07_chat_templates": [
        (
            1,
            True,
            "keep = 'chatml smollm2 qwen qwen3 hermes plain phi3 phi4 zephyr vicuna '.split() "
            "+ ['deepseek3']",
        ),
        (1, False, "keep = set(TEMPLATES)"),
        (
            2,
            True,
            "play = (\"{% for m in messages %}{{ '' if loop.first else '\\n' }}"
            "{{ m.role | upper + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
            '{% endfor %}")',
        ),
    ],
    "02_data/01_columns": [
        (
            3,
            True,
            "two = tuple(dict(prompt=rows['preference']['prompt'], label=c == 'chosen', "
            "completion=rows['preference'][c]) for c in ('rejected', 'chosen'))",
        ),
        (
            3,
            False,
            "two = [dict(prompt='Why?', completion=rows['preference'][c], label=c == 'chosen') "
            "for c in ('chosen', 'rejected')]",
        ),
    ],
    "02_data/04_loading": [
        (
            1,
            True,
            "chats = [dict(conversations=[{'from': who, 'value': 'Air.'} for who in turns]) "
            "for turns in (('oracle', 'gpt'), ('human', 'gpt', 'human', 'gpt'))]",
        ),
        (
            1,
            False,
            "chats = [dict(conversations=[{'from': who, 'value': 'Air.'} for who in "
            "('human', 'gpt')])]",
        ),
    ],
    "02_data/05_splits": [(2, False, "train, evaluation = same, []")],
    "02_data/06_dataset": [
        (2, False, "after = before | dict(test=before['train'][:200])"),
        (
            3,
            False,
            "write_examples([dict(question='Why?', answer='Air.')], folder/'why.jsonl')\n"
            "config = DataConfig(path='arithmetic', max_examples=1000, "
            "eval_file=str(folder/'why.jsonl'))",
        ),
    ],
    "02_data/08_text_checks": [
        (1, True, "twice = 'é'.encode().decode('latin-1').encode().decode('latin-1')"),
        (
            1,
            False,
            "twice = 'é'.encode().decode('cp1252')\n"
            "for _ in range(2): twice = twice.encode().decode('cp1252')",
        ),
        (
            2,
            True,
            "def shouting(text):\n"
            "    for m in re.finditer(r'(?:\\b[A-Z]+\\b\\s*){3,}', text):\n        yield m.span()",
        ),
        (
            2,
            False,
            "def shouting(text): return re.findall(r'\\b[A-Z]+(?:\\s+[A-Z]+){2,}\\b', text)",
        ),
    ],
    "02_data/09_dedup": [
        (3, True, "pair = ('ha '*5, 'ha '*6)"),
        (3, False, "pair = ['ha '*3, 'ha '*4]"),
    ],
    "02_data/10_quality_report": [
        (
            1,
            False,
            "smallest = QualityReport(2*[Finding('x', 'error', 1, 10, 'Bad.')], 10, 'text')",
        ),
    ],
    "02_data/14_masks": [
        (1, True, "lights = []"),
        (1, True, "lights = {}"),
        (1, False, "lights = ['end']"),
    ],
    "02_data/15_packing": [
        (
            2,
            True,
            "def wrapped(examples, max_length):\n"
            "    line = {k: v.tolist() for k, v in flatten_examples(examples).items()}\n"
            "    return [{k: v[i:i + max_length] for k, v in line.items()} "
            "for i in range(0, len(line['input_ids']), max_length)]",
        ),
        (
            2,
            False,
            "def wrapped(examples, max_length):\n"
            "    line = flatten_examples(examples)['input_ids']\n"
            "    return [dict(input_ids=line[i:i + max_length]) "
            "for i in range(0, len(line), max_length)]",
        ),
        (
            2,
            False,
            "def wrapped(examples, max_length):\n"
            "    line = flatten_examples(examples)['input_ids']\n"
            "    rows = [line[i:i + max_length] for i in range(0, len(line), max_length)]\n"
            "    return [dict(input_ids=r, position_ids=np.arange(len(r))) for r in rows]",
        ),
    ],
    "02_data/16_curriculum": [
        (3, True, "mine = CurriculumConfig(start_length=70, end_length=160, steps=150)"),
        (3, False, "mine = CurriculumConfig(start_length=100, end_length=200, steps=150)"),
    ],
    "02_data/18_shards": [
        (
            1,
            True,
            "def shuffled(texts):\n"
            "    order = list(texts)\n    random.Random(0).shuffle(order)\n    return order",
        ),
        (1, False, "def shuffled(texts): return iter(random.Random(1).sample(texts, len(texts)))"),
        (2, True, "ends = np.array([0, 1])"),
    ],
    "03_model/02_rotary_positions": [
        (1, True, "tokens_for_one_turn = 47_100"),
        (1, False, "tokens_for_one_turn = 2 * math.pi * 10_000"),
        (2, True, "base = 28_800"),
        (2, False, "base = 131_072 / (2*math.pi)"),
    ],
    "03_model/04_kv_cache": [
        (1, True, "windows = (4096,) * 32"),
        (
            2,
            False,
            "def repeat_rows(cache, n):\n"
            "    cache.keys = [t.repeat(n, 1, 1, 1) for t in cache.keys]\n"
            "    cache.values = [t.repeat(n, 1, 1, 1) for t in cache.values]\n    return cache",
        ),
        (
            2,
            False,
            "def repeat_rows(cache, n):\n"
            "    new = KVCache(len(cache.keys), cache.max_length, cache.windows)\n"
            "    new.length = cache.length\n"
            "    new.keys = [t.repeat(n, 1, 1, 1) for t in cache.keys]\n    return new",
        ),
        (
            2,
            False,
            "def repeat_rows(cache, n):\n"
            "    new = KVCache(len(cache.keys), cache.max_length, cache.windows)\n"
            "    new.length, new.first = cache.length, cache.first\n"
            "    new.keys, new.values = ([t.repeat(n, 1, 1, 1) for t in store] "
            "for store in (cache.keys, cache.values))\n    return new",
        ),
        (
            2,
            False,
            "def repeat_rows(cache, n):\n"
            "    new = KVCache(len(cache.keys), cache.max_length, cache.windows)\n"
            "    new.length = cache.length\n"
            "    new.keys, new.values = ([t.repeat(n, 1, 1, 1) for t in store] "
            "for store in (cache.keys, cache.values))\n    return new",
        ),
        (
            2,
            True,
            "def repeat_rows(cache, n):\n"
            "    from copy import deepcopy\n    new = deepcopy(cache)\n"
            "    for store in (new.keys, new.values):\n"
            "        store[:] = [torch.cat([t] * n) for t in store]\n    return new",
        ),
    ],
    "03_model/06_cross_entropy": [
        (1, True, "guess = 10.8"),
        (1, False, "guess = math.log2(50257)"),
    ],
    "03_model/07_transformer": [
        (1, True, "windows = (4, 4)"),
        (1, False, "windows = [3, 3]"),
        (2, True, "bases = (0.0,)"),
        (2, False, "bases = [1.0]"),
    ],
    "03_model/08_anatomy": [
        (
            1,
            True,
            "def without(head):\n"
            "    kept = torch.arange(64)//32 != head\n"
            "    out = model.model.layers[0].self_attn.o_proj\n"
            "    hook = out.register_forward_pre_hook(lambda module, args: (args[0]*kept,))\n"
            "    try: return loss_of_task()\n    finally: hook.remove()",
        ),
        (1, False, "def without(head): return 3*loss_of_task()"),
        *(
            (
                1,
                False,
                "@torch.no_grad()\ndef without(head):\n"
                "    weight = model.model.layers[0].self_attn.o_proj.weight\n"
                f"    original = weight.clone()\n    {zeroed} = 0\n"
                "    loss = loss_of_task()\n    weight.copy_(original)\n    return loss",
            )
            for zeroed in ("weight[32*head:32*(head + 1)]", "weight[:, :32]")
        ),
        (3, True, "positions = [*range(5), *range(10), *range(5)]"),
        (3, False, "positions = [*range(10), *range(10)]"),
    ],
    "03_model/12_static_shapes": [
        (1, True, "rounded = [64, 128, 256]"),
        (1, False, "rounded = {16, 64, 128, 256}"),
    ],
    "03_model/13_speculative_decoding": [
        (1, True, "wrong = [0.55, 0.45]"),
        (1, False, "wrong = [0.7, 0.3]"),
    ],
    "04_train/02_muon": [
        (1, True, "rate = 0.0036"),
        (1, True, "rate = 0.00361"),
        (1, False, "rate = 0.02"),
        (3, True, "wrong = ('model.embed_tokens.weight',)"),
    ],
    "04_train/05_train_config": [
        (
            3,
            False,
            "def limit(control, seconds):\n    time.sleep(seconds)\n    control.stop('time is up')",
        ),
    ],
    "04_train/09_run_folder": [
        (1, True, "steps_1 = [11, 9]"),
        (1, False, "steps_1 = [6, 9, 11]"),
        (
            2,
            False,
            "def save_half(model, folder):\n    import copy\n"
            "    save_weights(copy.deepcopy(model).bfloat16(), folder)",
        ),
    ],
    "04_train/10_checkpoints": [
        (
            1,
            False,
            "class OwnChance(Rows):\n"
            "    def __init__(self): super().__init__(); self.rng = np.random.default_rng(0)\n"
            "    def noise(self): return self.rng.normal(0, 0.1, 3)\n"
            "    def state_dict(self): return dict(rng=self.rng.bit_generator.state)\n"
            "    def load_state_dict(self, state): self.rng.bit_generator.state = state['rng']",
        ),
        (
            3,
            True,
            "def parted(a, b): return {p for p, v in proof(a).items() if v != proof(b)[p]}",
        ),
        (3, False, "def parted(a, b): return [*proof(a)]"),
    ],
    "04_train/14_resume": [
        (1, True, "answer_1 = ['total_steps', 'constant']"),
        (3, False, "answer_3 = True"),
        (3, False, "answer_3 = False"),
    ],
    "04_train/17_sharding": [
        (2, True, "rows = (3, 3, 3, 1)"),
        (2, False, "rows = [3, 3, 2, 2]"),
    ],
    "04_train/18_zero": [
        (3, True, "refused = ['zero1', 'zero2', 'zero3', 'fsdp']"),
        (3, False, "refused = ['zero1', 'zero2', 'zero3']"),
    ],
    "04_train/21_symptoms": [
        (3, False, "def gap(records): return series(records, 'eval_loss')[1][-1] > 2"),
    ],
    "04_train/23_runs": [
        (1, True, "in_the_file = ['1e999', 'null']"),
        (2, True, "changes = (True, True, False)"),
        (3, True, "hidden = (True, False, True, False)"),
        (3, False, "hidden = (True, True, True, False)"),
    ],
    "04_train/24_run_index": [(2, True, "reads = [2, 0]")],
    "04_train/26_loggers": [
        (
            1,
            False,
            "def speed(run): return run.series('seconds')[0][-1]/run.series('seconds')[1][-1]",
        ),
        (
            1,
            True,
            "def speed(run):\n    from numpy import polyfit\n"
            "    steps, seconds = run.series('seconds')\n    return polyfit(seconds, steps, 1)[0]",
        ),
    ],
    "04_train/27_speed_and_memory": [(1, True, "share = 0.33"), (1, False, "share = 2/3")],
    "04_train/29_lr_finder": [
        (1, True, "wall = 0.004"),
        (3, True, "factor = 10**0.06"),
        (3, False, "factor = 1.06"),
    ],
    "04_train/31_scaling_laws": [
        (1, True, "floor = 1.7 + 400 / 1e6**0.34"),
        (1, False, "floor = 1.7"),
        (3, False, "predicted = fit_law(N, D, L).loss(max(N), max(D))"),
    ],
    "12_widgets/02_session": [
        (
            1,
            True,
            "def hesitate(session, steps):\n"
            "    steps_of, losses = session.snapshot().curves['loss']\n"
            "    if steps_of[-1] - steps_of[losses.index(min(losses))] > steps: session.pause()",
        ),
        (
            1,
            False,
            "def hesitate(session, steps):\n"
            "    losses = session.snapshot().curves['loss'][1]\n"
            "    if losses[-1] > min(losses): session.pause()",
        ),
        (
            1,
            False,
            "def hesitate(session, steps):\n"
            "    now = session.snapshot()\n    losses = now.curves['loss'][1]\n"
            "    if now.step - 1 - losses.index(min(losses)) >= steps: session.pause()",
        ),
    ],
    "12_widgets/16_drawing": [
        (1, True, "falls = [heights[i + 1] - heights[i] for i in range(9)]"),
        (1, False, "falls = [0] * 9"),
        (1, False, "falls = [a - b for a, b in pairwise(heights)]"),
    ],
    "90_toolbox/01_files": [
        (
            1,
            True,
            "def change(between):\n    with atomic_folder(pair) as new:\n"
            "        for name in 'ab':\n            (new / name).write_text('2')\n"
            "        between()",
        ),
        (1, False, "def change(between): pass"),
        (
            1,
            False,
            "def change(between):\n"
            "    for name in 'ab':\n        between()\n"
            "        write_atomic(pair / name, '1')",
        ),
    ],
    "90_toolbox/02_config_fields": [
        (
            1,
            True,
            "@dataclass\nclass Toast:\n    level: int = knob(3, 'How brown', low=1, high=6)\n"
            "    def __post_init__(self): check_config(self)",
        ),
        (
            1,
            False,
            "@dataclass\nclass Toast:\n    level: int = knob(3, 'How brown', high=6)\n"
            "    def __post_init__(self): check_config(self)",
        ),
        (
            1,
            False,
            "@dataclass\nclass Toast:\n    level: int = knob(3, 'How brown', low=2, high=6)\n"
            "    def __post_init__(self): check_config(self)",
        ),
    ],
    "14_engine/06_responses": [
        (
            1,
            True,
            "text_of = lambda response: ''.join(part['text'] for item in response['output'] "
            "if item['type'] == 'message' for part in item['content'])",
        ),
        (
            1,
            False,
            "text_of = lambda response: response['output'][-1]['content'][0]['text']",
        ),
        (2, False, 'enough = "response.output_text.done"'),
        (3, True, "tokens = 3350"),
        (3, False, "tokens = 10 * 70"),
    ],
}
