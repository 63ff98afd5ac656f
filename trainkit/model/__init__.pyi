from . import (
    attention as attention,
    config as config,
    decoding as decoding,
    experts as experts,
    generation as generation,
    speculative as speculative,
    transformer as transformer,
)
from .attention import (
    KVCache as KVCache,
    attend as attend,
    make_mask as make_mask,
    rope_frequencies as rope_frequencies,
)
from .config import (
    ModelConfig as ModelConfig,
    PRESETS as PRESETS,
    count_flops as count_flops,
    count_parameters as count_parameters,
)
from .decoding import DecodePlan as DecodePlan
from .experts import (
    MixtureOfExperts as MixtureOfExperts,
    balance_loss as balance_loss,
    expert_load as expert_load,
)
from .generation import (
    SamplingConfig as SamplingConfig,
    ThinkingBudget as ThinkingBudget,
    generate as generate,
    stream as stream,
)
from .speculative import Drafter as Drafter
from .transformer import (
    Attention as Attention,
    Block as Block,
    MLP as MLP,
    ModelOutput as ModelOutput,
    RMSNorm as RMSNorm,
    Transformer as Transformer,
    chunked_cross_entropy as chunked_cross_entropy,
)
