"Flags as they are typed: what each line of `trainkit train` and `launch` means."

import json
import shlex
from functools import cache
from types import SimpleNamespace

import pytest
from support.snapshots import answer_all
from typer.main import get_command

from trainkit.cli import app
from trainkit.recipes import commands


@cache
def commands_of_app():
    "Made once: it takes as long as half of the lines below."
    return get_command(app).commands  # type: ignore


def parsed(question):
    "The parameters that a line sets, or the error."
    name, *words = shlex.split(question)
    command = commands_of_app()[name]
    try:
        context = command.make_context(name, words)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    usual = {p.name: p.get_default(context, call=False) for p in command.params}
    found = {k: v for k, v in context.params.items() if v != usual.get(k) and v is not None}
    return json.dumps({k: v for k, v in found.items() if v != []}, default=str)


def test_each_line_keeps_its_meaning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    answer_all(parsed, "lines.txt")


FLAGS = {  # of `train` in other programs, from their argument classes and scripts
    "LLaMA-Factory": """
model_name_or_path adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer
resize_vocab split_special_tokens add_tokens add_special_tokens model_revision
low_cpu_mem_usage rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth
use_unsloth_gc enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing
use_reentrant_gc upcast_layernorm upcast_lmhead_output train_from_scratch infer_backend
offload_folder use_kv_cache infer_dtype hf_hub_token ms_hub_token om_hub_token
print_param_status trust_remote_code quantization_method quantization_bit quantization_type
double_quantization quantization_device_map export_dir export_size export_device
export_quantization_bit export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util
template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history
streaming buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_batch_size
preprocessing_num_workers max_samples eval_num_beams ignore_pad_token_for_loss val_size
eval_on_each_dataset packing neat_packing tool_format default_system enable_thinking
tokenized_path data_shared_file_system freeze_trainable_layers freeze_trainable_modules
freeze_extra_modules additional_target lora_alpha lora_dropout lora_rank lora_target
loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter
pissa_convert create_new_adapter pref_beta pref_ftx pref_loss dpo_label_smoothing
kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm
ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit
reward_model reward_model_adapters reward_model_type ld_alpha use_galore galore_target
galore_rank use_apollo use_badam use_adam_mini use_muon pure_bf16 stage finetuning_type
use_llama_pro freeze_vision_tower compute_accuracy disable_shuffling early_stopping_steps
plot_loss include_effective_tokens_per_second do_sample temperature top_p top_k num_beams
max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens
per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs
lr_scheduler_type warmup_ratio warmup_steps bf16 fp16 ddp_timeout resume_from_checkpoint
logging_steps save_steps overwrite_output_dir report_to output_dir save_only_model
max_grad_norm optim weight_decay max_steps eval_strategy eval_steps
per_device_eval_batch_size predict_with_generate do_train do_eval do_predict seed
save_total_limit swanlab_project use_swanlab
""",
    "litgpt": """
checkpoint_dir out_dir precision quantize devices num_nodes lora_r lora_alpha lora_dropout
lora_query lora_key lora_value lora_projection lora_mlp lora_head data data.json_path
data.val_split_fraction data.mask_prompt data.num_workers data.prompt_style
train.save_interval train.log_interval train.global_batch_size train.micro_batch_size
train.lr_warmup_steps train.lr_warmup_fraction train.epochs train.max_tokens train.max_steps
train.max_seq_length train.tie_embeddings train.max_norm train.min_lr eval.interval
eval.max_new_tokens eval.max_iters eval.initial_validation eval.final_validation logger_name
seed optimizer access_token model_name tokenizer_dir initial_checkpoint_dir resume
model_config max_seq_length global_batch_size micro_batch_size log_interval save_interval
lr_warmup_steps max_tokens
""",
    "nanochat and nanoGPT": """
run device_type depth num_iterations target_flops target_param_data_ratio device_batch_size
total_batch_size embedding_lr unembedding_lr weight_decay matrix_lr grad_clip warmup_ratio
warmdown_ratio final_lr_frac resume_from_step eval_every eval_tokens core_metric_every
core_metric_max_per_task sample_every save_every model_tag model_step max_seq_len
aspect_ratio head_dim window_pattern source dtype num_epochs init_lr_frac eval_steps
eval_metrics_every examples_per_step max_new_tokens num_samples top_k temperature adam_beta1
adam_beta2 scalar_lr max_iters batch_size block_size n_layer n_head n_embd dropout bias
learning_rate lr_decay_iters min_lr beta1 beta2 decay_lr warmup_iters eval_interval
eval_iters eval_only always_save_checkpoint init_from wandb_log wandb_project wandb_run_name
gradient_accumulation_steps out_dir backend device compile dataset
""",
    "older scripts, mlx-lm and habit": """
epochs epoch n_epochs nepochs num_epochs batch_size bs bsz train_batch_size batch
per_gpu_train_batch_size per_device_batch_size device_batch_size grad_accum
gradient_accumulation grad_accumulation_steps accumulate_grad_batches lr learning-rate
max-lr peak_lr base_lr wd weight-decay warmup warmup_steps num_warmup_steps scheduler
lr_scheduler lr_schedule lr_scheduler_type optimizer optim model base_model output out
output_dir save_dir out_dir result_dir name run_name experiment_name project_name
max_seq_length max_seq_len seq_len seq_length sequence_length context_length block_size
max_length cutoff_len n_ctx seed random_seed steps max_steps num_steps total_steps iters
max_iters num_iterations save_every eval_every log_every log_interval logging_steps
save_freq eval_freq dtype precision mixed_precision amp bf16 fp16 tf32 device gpu gpus cpu
use_cpu no_cuda dropout grad_clip clip_grad max_grad_norm gradient_clip_val clip_norm
patience early_stopping val_split val_size test_size eval_ratio validation_split_percentage
train_file validation_file text_column prompt_column num_workers workers
dataloader_num_workers lora lora_r rank lora_rank lora_alpha alpha lora_dropout
target_modules qlora load_4bit load_in_4bit 4bit bits gradient_checkpointing grad_checkpoint
checkpointing compile torch_compile flash_attention flash_attn use_flash_attention_2
attn_implementation packing sample_packing wandb use_wandb tensorboard report_to push_to_hub
hub_model_id chat_template template prompt_template system_prompt beta dpo_beta kl_coef
reward reward_funcs num_generations temperature top_p top_k max_new_tokens data data_dir
data_path train_data dataset dataset_path datasets train val_data valid eval_data
hidden_size num_layers n_layers num_heads n_heads vocab_size ctx_len fine_tune_type
val_batches steps_per_report steps_per_eval adapter_path mask_prompt
""",
}


@pytest.mark.parametrize("program", FLAGS)
def test_a_flag_of_another_program_is_taken_or_answered(program):
    "Never with `No such option` and a word that only looks near."
    unknown = {}
    for word in FLAGS[program].split():
        for value in (["1"], ["0.1"], ["true"], []):
            answer = parsed(shlex.join(["train", f"--{word}", *value]))
            if "No such option" not in answer:
                break
        else:
            unknown[word] = answer
    assert not unknown, unknown


def printed(talk, line, capsys):
    commands._print_answer(talk, line)
    return capsys.readouterr().out


@pytest.mark.parametrize("comparing", [False, True])
def test_an_answer_is_printed_with_the_names_of_both_models(comparing, capsys):
    talk = SimpleNamespace(
        comparing=comparing,
        say=lambda line: [("base", "a"), ("base", line), ("model", "c")],
        again=lambda: [("model", "d")],
    )
    base, model = ("[base] ", "[model] ") if comparing else ("", "")
    assert printed(talk, "hi", capsys) == f"{base}ahi\n{model}c"
    assert printed(talk, "/retry", capsys) == f"{model}d"


@pytest.mark.parametrize(
    "error, text",
    [
        (FloatingPointError("nan"), "here: nan"),
        (ValueError("no chat template"), "here: no chat template"),
        (ValueError("here has no chat template"), "here has no chat template"),
        (ValueError("other"), "other"),
        (UnicodeError("chat template"), "chat template"),
    ],
)
def test_errors_of_a_model_name_its_folder(error, text):
    def fail(model):
        raise error

    with pytest.raises(type(error)) as raised:
        commands.with_model_name(fail)(model="here")
    assert str(raised.value) == text


def test_ctrl_c_in_a_command_ends_with_a_line_of_its_own(monkeypatch, capsys):
    "The prompt of the shell comes on a new line, not behind ^C."
    from trainkit import cli, system

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(system, "doctor", interrupted)
    monkeypatch.setattr("sys.argv", ["trainkit", "doctor"])
    monkeypatch.setattr(cli, "_open_streams", lambda: None)
    monkeypatch.setattr(cli, "is_terminal", lambda stream: True)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err) == (130, "\nInterrupted.\n")
