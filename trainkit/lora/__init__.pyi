from . import (
    adapters as adapters,
    inject as inject,
    merge as merge,
    rank as rank,
)
from .adapters import (
    adapter_names as adapter_names,
    adapters_off as adapters_off,
    combine_adapters as combine_adapters,
    load_adapter as load_adapter,
    remove_adapter as remove_adapter,
    save_adapter as save_adapter,
    use_adapter as use_adapter,
)
from .inject import (
    LoRAConfig as LoRAConfig,
    LoRAEmbedding as LoRAEmbedding,
    LoRALayer as LoRALayer,
    LoRALinear as LoRALinear,
    add_lora as add_lora,
    lora_plus as lora_plus,
    target_layers as target_layers,
    trainable_report as trainable_report,
)
from .merge import (
    agreement as agreement,
    merge_folder as merge_folder,
    merge_lora as merge_lora,
    merge_quantized as merge_quantized,
    merged_lora as merged_lora,
    unmerge_lora as unmerge_lora,
)
from .rank import (
    GrowRank as GrowRank,
    effective_rank as effective_rank,
    grow_rank as grow_rank,
    shrink_rank as shrink_rank,
    spectrum as spectrum,
)
