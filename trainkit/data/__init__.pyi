from . import (
    dataloader as dataloader,
    dataset as dataset,
    dedup as dedup,
    mixture as mixture,
    quality as quality,
    quality_report as quality_report,
    readers as readers,
    schema as schema,
    shards as shards,
    sources as sources,
    text_checks as text_checks,
    tokenization as tokenization,
)
from .dataloader import (
    Batches as Batches,
    CurriculumConfig as CurriculumConfig,
    collate as collate,
    encode_rows as encode_rows,
    pack as pack,
    packing_efficiency as packing_efficiency,
    token_blocks as token_blocks,
)
from .dataset import (
    DataConfig as DataConfig,
    chunk_examples as chunk_examples,
    clean_examples as clean_examples,
    load_examples as load_examples,
    load_splits as load_splits,
    load_texts as load_texts,
    split_examples as split_examples,
    stream_examples as stream_examples,
)
from .dedup import (
    drop_duplicates as drop_duplicates,
    find_leaks as find_leaks,
    near_pairs as near_pairs,
)
from .mixture import MixedRows as MixedRows
from .mixture import mix as mix
from .quality import check_examples as check_examples
from .quality_report import QualityReport as QualityReport
from .readers import (
    read_rows as read_rows,
    read_text as read_text,
    write_examples as write_examples,
)
from .schema import (
    KINDS as KINDS,
    as_messages as as_messages,
    example_kind as example_kind,
    to_messages as to_messages,
)
from .shards import (
    TokenRows as TokenRows,
    TokenShards as TokenShards,
    open_shards as open_shards,
    tokenize_to_disk as tokenize_to_disk,
    verify_shards as verify_shards,
)
from .sources import (
    CORPORA as CORPORA,
    arithmetic_tasks as arithmetic_tasks,
    best_corpus as best_corpus,
)
from .text_checks import mask_personal as mask_personal
from .tokenization import (
    length_report as length_report,
    show_mask as show_mask,
    tokenize_examples as tokenize_examples,
)
