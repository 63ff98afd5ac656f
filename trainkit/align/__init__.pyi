from . import (
    distillation as distillation,
    dpo as dpo,
    environments as environments,
    episodes as episodes,
    game as game,
    invariant as invariant,
    kto as kto,
    logprobs as logprobs,
    policy as policy,
    preference_data as preference_data,
    reference as reference,
    reward_model as reward_model,
    rewards as rewards,
    rl as rl,
    rollouts as rollouts,
    search as search,
)
from .distillation import (
    DistillBatches as DistillBatches,
    DistillConfig as DistillConfig,
    Teacher as Teacher,
    TeacherCache as TeacherCache,
    distill_objective as distill_objective,
    divergence as divergence,
    shared_vocabulary as shared_vocabulary,
    write_answers as write_answers,
)
from .dpo import (
    DPOConfig as DPOConfig,
    dpo_objective as dpo_objective,
    preference_loss as preference_loss,
)
from .environments import (
    Calculator as Calculator,
    ENVIRONMENTS as ENVIRONMENTS,
    Environment as Environment,
    FileSearch as FileSearch,
    GuessNumber as GuessNumber,
    ReasoningGym as ReasoningGym,
    Reply as Reply,
    TextArena as TextArena,
    ToolEnvironment as ToolEnvironment,
    call_tool as call_tool,
    tool_schema as tool_schema,
)
from .episodes import (
    Answer as Answer,
    Episode as Episode,
    pack_episodes as pack_episodes,
    play_episodes as play_episodes,
    sample_answers as sample_answers,
)
from .game import TokenGame as TokenGame
from .invariant import batch_invariant as batch_invariant
from .kto import (
    UnpairedBatches as UnpairedBatches,
    kto_objective as kto_objective,
    tokenize_unpaired as tokenize_unpaired,
)
from .logprobs import (
    pair_log_probs as pair_log_probs,
    sequence_log_probs as sequence_log_probs,
    token_log_probs as token_log_probs,
)
from .policy import ActorCritic as ActorCritic, token_scores as token_scores
from .preference_data import PairBatches as PairBatches, tokenize_pairs as tokenize_pairs
from .reference import (
    make_reference as make_reference,
    precompute_reference as precompute_reference,
)
from .reward_model import (
    RewardModel as RewardModel,
    reward_loss as reward_loss,
    reward_objective as reward_objective,
    score_pairs as score_pairs,
)
from .rewards import (
    answer_reader as answer_reader,
    passes_tests as passes_tests,
    right_answer as right_answer,
    right_format as right_format,
    right_length as right_length,
)
from .rl import (
    RLConfig as RLConfig,
    gae as gae,
    group_relative as group_relative,
    grpo_objective as grpo_objective,
    leave_one_out as leave_one_out,
    ppo_objective as ppo_objective,
    reinforce_objective as reinforce_objective,
    rl_objective as rl_objective,
    rloo_objective as rloo_objective,
)
from .rollouts import Rollouts as Rollouts
from .search import (
    Candidate as Candidate,
    SearchPoint as SearchPoint,
    SearchResult as SearchResult,
    accuracy_chart as accuracy_chart,
    accuracy_curve as accuracy_curve,
    best_of_n as best_of_n,
    budget_forcing as budget_forcing,
    mean_probability as mean_probability,
    pass_at_k_intervals as pass_at_k_intervals,
    sample_candidates as sample_candidates,
    self_consistency as self_consistency,
    weighted_vote as weighted_vote,
)
