from . import (
    bpe as bpe,
    bpe_tokenizer as bpe_tokenizer,
    chat as chat,
    chat_template as chat_template,
    encoder as encoder,
    pretokenize as pretokenize,
)
from .bpe import count_words as count_words, learn_merges as learn_merges
from .bpe_tokenizer import (
    BPETokenizer as BPETokenizer,
    from_json as from_json,
    tokenizer_json as tokenizer_json,
)
from .chat import (
    after_thought as after_thought,
    answer_ends as answer_ends,
    find_template as find_template,
    render as render,
    render_batch as render_batch,
    resize_embeddings as resize_embeddings,
    set_template as set_template,
)
from .chat_template import (
    TEMPLATES as TEMPLATES,
    TOOL_FORMATS as TOOL_FORMATS,
    AnswerReader as AnswerReader,
    Template as Template,
    ToolFormat as ToolFormat,
    find_tool_format as find_tool_format,
    parse_tool_calls as parse_tool_calls,
    render_text as render_text,
    split_thought as split_thought,
)
from .encoder import Encoder as Encoder
from .pretokenize import PATTERNS as PATTERNS, split_words as split_words
