"""Names from other trainers, and what they are called here.

The names of TRL and the transformers Trainer, prime-rl, verl, OpenRLHF, axolotl, LLaMA-Factory, SkyRL and
Telescope, with underscores. `hints.py` reads these tables.
"""

RENAMED = {
    # TRL and the transformers Trainer
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.type",
    "optimizer_name": "optimizer.type",
    "momentum": "optimizer.momentum",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "scheduler.type",
    "warmup_steps": "scheduler.warmup_steps",
    "warmup_ratio": "scheduler.warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "full_determinism": "deterministic",
    "data_seed": "seed",
    "attn_implementation": "attention",
    "router_aux_loss_coef": "router_aux_coef",
    "cast_lm_head_to_fp32": "precision.head",
    "use_cpu": "gpus",
    "label_smoothing": "loss.label_smoothing",
    "beta": "loss.beta|kl.coef",
    "assistant_only_loss": "data.learn",
    "completion_only_loss": "data.learn",
    "shuffle_dataset": "data.shuffle",
    "truncation_mode": "data.too_long",
    "test_split_size": "data.held_out",
    "use_peft": "lora.rank",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "lora_target": "lora.targets",
    "lora_modules_to_save": "lora.modules_to_save",
    "use_rslora": "lora.rslora",
    "project": "wandb.project",
    "ref_model": "kl.reference",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "model_name_or_path": "model.name",
    "dataset_name": "data.name|environment.name",
    "dataset_train_split": "data.split",
    "num_train_epochs": "data.epochs|max_steps",
    "num_epochs": "data.epochs|max_steps",
    "dtype": "inference.dtype|precision.compute",
    "torch_dtype": "precision.compute",
    "epochs": "data.epochs|max_steps",
    "steps": "max_steps",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "resume_from_checkpoint": "ckpt.resume",
    "run_name": "wandb.name",
    "num_generations": "samples_per_prompt",
    "num_iterations": "updates_per_batch",
    "temperature": "sampling.temperature",
    "max_new_tokens": "sampling.max_tokens",
    "generation_batch_size": "prompts_per_step",
    "mask_truncated_completions": "overlong.type",
    "use_bias_correction_kl": "kl.unbiased",
    "reward_funcs": "environment.name",
    "vllm_mode": "colocate",
    "vllm_server_port": "inference_url",
    "vllm_server_host": "inference_url",
    "vllm_server_timeout": "server_timeout",
    "vllm_tensor_parallel_size": "tensor_parallel",
    "vllm_gpu_memory_utilization": "kv_cache_memory",
    "log_completions": "keep_rollouts_gb",
    "max_completion_length": "sampling.max_tokens",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss.type",
    "importance_sampling_level": "loss.type",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "entropy_coef": "loss.entropy_coef",
    "vllm_importance_sampling_mode": "loss.importance",
    "vllm_importance_sampling_clip_max": "loss.importance_max",
    "vllm_importance_sampling_clip_min": "loss.importance_min",
    "scale_rewards": "advantage.type",
    "vllm_server_base_url": "inference_url",
    "vllm_max_model_length": "max_model_len",
    "max_staleness": "max_off_policy_steps",
    "max_inflight_tasks": "max_in_flight",
    # prime-rl
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.max_norm": "optimizer.max_grad_norm",
    "optim.betas1": "optimizer.betas",
    "optim.betas2": "optimizer.betas",
    "scheduler.decay_steps": "scheduler.steps",
    "scheduler.min_lr": "scheduler.min_lr_ratio",
    "keep_interval": "ckpt.keep_every",
    "resume": "ckpt.resume",
    "resume.step": "ckpt.resume_step",
    "resume.dir": "ckpt.resume",
    "resume_step": "ckpt.resume_step",
    "run.name": "output_dir",
    "monitors.wandb.project": "wandb.project",
    "monitors.wandb.name": "wandb.name",
    "weight_broadcast.type": "weight_transport",
    "model.ac": "activation_checkpointing",
    "dp_replicate": "replicas",
    "model.dp_replicate": "replicas",
    "model.compile": "compile",
    "model.seq_len": "seq_len",
    "model.optimization_dtype": "precision.compute",
    "model.reduce_dtype": "precision.reduce",
    "data.seq_len": "seq_len",
    "data.splits": "data.split",
    "group_size": "samples_per_prompt",
    "rollouts_per_example": "samples_per_prompt",
    "concurrency.max_inflight": "max_in_flight",
    "sampling.max_completion_tokens": "sampling.max_tokens",
    "env.id": "environment.name",
    "train.source": "environments",
    "loss.dppo_mask_low": "loss.delta_low",
    "loss.dppo_mask_high": "loss.delta_high",
    # verl
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.rollout.n": "samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.aggregation",
    "algorithm.adv_estimator": "advantage.type",
    "algorithm.rollout_correction.rollout_is": "loss.importance",
    "algorithm.rollout_correction.rollout_is_threshold": "loss.importance_max",
    "data.train_files": "data.name|environment.name",
    "data.max_response_length": "sampling.max_tokens",
    "trainer.save_freq": "ckpt.interval",
    "trainer.total_epochs": "data.epochs|max_steps",
    "trainer.default_local_dir": "output_dir",
    "actor_rollout_ref.actor.use_kl_loss": "kl.coef",
    "actor_rollout_ref.actor.kl_loss_coef": "kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "kl.estimator",
    "actor_rollout_ref.actor.ppo_epochs": "updates_per_batch",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "mini_batches",
    "actor_rollout_ref.actor.grad_clip": "optimizer.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "activation_checkpointing",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "kv_cache_memory",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "tensor_parallel",
    "algorithm.kl_ctrl.kl_coef": "kl.coef",
    "algorithm.gamma": "critic.gamma",
    "algorithm.lam": "critic.gae_lambda",
    "critic.optim.lr": "critic.optimizer.lr",
    "custom_reward_function.path": "environment.name",
    "data.max_prompt_length": "max_model_len",
    "trainer.total_training_steps": "max_steps",
    "trainer.n_gpus_per_node": "slurm.gpus_per_node|workers",
    "trainer.nnodes": "slurm.nodes",
    "trainer.project_name": "wandb.project",
    "trainer.experiment_name": "wandb.name",
    "trainer.resume_mode": "ckpt.resume",
    "trainer.max_actor_ckpt_to_keep": "ckpt.keep_last",
    # OpenRLHF
    "pretrain": "model.name",
    "max_len": "seq_len",
    "max_epochs": "data.epochs|max_steps",
    "num_episodes": "max_steps",
    "save_path": "output_dir",
    "n_samples_per_prompt": "samples_per_prompt",
    "rollout_batch_size": "prompts_per_step",
    "generate_max_len": "sampling.max_tokens",
    "prompt_data": "environment.name",
    "prompt_max_len": "max_model_len",
    "actor_learning_rate": "optimizer.lr",
    "critic_learning_rate": "critic.optimizer.lr",
    "init_kl_coef": "kl.coef",
    "eps_clip": "loss.clip_low",
    "lambd": "critic.gae_lambda",
    "gamma": "critic.gamma",
    "advantage_estimator": "advantage.type",
    "vllm_num_engines": "inference_url",
    "remote_rm_url": "environment.name",
    "colocate_all_models": "colocate",
    "ckpt_path": "ckpt.dir",
    "max_ckpt_num": "ckpt.keep_last",
    "load_checkpoint": "ckpt.resume",
    "use_wandb": "wandb.mode",
    "wandb_run_name": "wandb.name",
    # axolotl
    "base_model": "model.name",
    "sequence_len": "seq_len",
    "micro_batch_size_per_gpu": "micro_batch_size",
    "datasets": "data.sets|data.name",
    "val_set_size": "data.held_out",
    "test_datasets": "validation",
    "saves_per_epoch": "ckpt.interval",
    "lora_target_linear": "lora.targets",
    "wandb_project": "wandb.project",
    "wandb_name": "wandb.name",
    "wandb_mode": "wandb.mode",
    "train_on_inputs": "data.learn",
    # LLaMA-Factory
    "finetuning_type": "lora.rank",
    "cutoff_len": "seq_len",
    "val_size": "data.held_out",
    "pref_beta": "loss.beta",
    "pref_loss": "loss.type",
    "flash_attn": "attention",
    "dataset_dir": "data.name",
    "train_on_prompt": "data.learn",
    # Telescope, SkyRL, and how the transformers Trainer names checkpoints
    "checkpoint_every": "ckpt.interval",
    "ckpt_interval": "ckpt.interval",
    "checkpoint_dir": "ckpt.dir",
    "checkpoint_save_training_state": "ckpt.training_state",
    "save_only_model": "ckpt.training_state",
    "checkpoint_keep_last": "ckpt.keep_last",
    "max_ckpts_to_keep": "ckpt.keep_last",
    "checkpoint_keep_every": "ckpt.keep_every",
    "load_best_model_at_end": "ckpt.keep_best",
    "early_stopping_patience": "validation",
    "metric_for_best_model": "ckpt.metric",
    "greater_is_better": "ckpt.mode",
    "save_strategy": "ckpt.interval",
    "resume_mode": "ckpt.resume",
    "resume_path": "ckpt.resume",
    # abbreviations and other likely guesses
    "model": "model.name",
    "data": "data.name|environment.name",
    "dataset": "data.name|environment.name",
    "output": "output_dir",
    "save_every": "ckpt.interval",
    "gpus": "workers",
    "num_gpus": "workers",
    "world_size": "workers",
    "tensor_parallel_size": "tensor_parallel",
    "gpu_memory_utilization": "kv_cache_memory",
}
"""Names used elsewhere, and the last keys of the corresponding setting here."""

NOTES = {
    "warmup_ratio": "in steps",
    "optim": "adamw, adamw_8bit, muon, sgd or lion",
    "optimizer_name": "adamw, adamw_8bit, muon, sgd or lion",
    "use_cpu": "0 for none",
    "use_peft": "the section [lora] turns adapters on",
    "finetuning_type": "[lora] trains an adapter, freeze leaves weights out, neither trains all",
    "attn_implementation": "auto, dense, varlen or flex",
    "flash_attn": "auto, dense, varlen or flex",
    "assistant_only_loss": "the default: the turns of the assistant",
    "completion_only_loss": "the default: the turns of the assistant",
    "train_on_inputs": "roles whose turns are learned, such as system user assistant",
    "train_on_prompt": "roles whose turns are learned, such as system user assistant",
    "test_datasets": "[[validation]] tables in a file",
    "early_stopping_patience": "patience of a [[validation]] table in a file",
    "vllm_server_port": "the address, such as http://127.0.0.1:8000",
    "vllm_server_host": "the address, such as http://127.0.0.1:8000",
    "vllm_num_engines": "the address of each server",
    "vllm_gpu_memory_utilization": "in bytes, such as 4G",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "in bytes, such as 4G",
    "mask_truncated_completions": "mask leaves answers that were cut off out of the loss",
    "log_completions": "all answers are kept; the command rollouts shows them",
    "custom_reward_function.path": "an environment holds the reward, such as my_env:Sums",
    "reward_funcs": "an environment holds the reward, such as my_env:Sums",
    "remote_rm_url": "an environment holds the reward, such as my_env:Sums",
    "prompt_data": "an environment holds the problems, such as my_env:Sums",
    "data.max_prompt_length": "a prompt and its answer together",
    "prompt_max_len": "a prompt and its answer together",
    "generation_batch_size": "each with as many answers as samples-per-prompt says",
    "rollout_batch_size": "each with as many answers as samples-per-prompt says",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "how many parts a batch is split into",
    "actor_rollout_ref.actor.clip_ratio": "and clip-high for the other side",
    "eps_clip": "and clip-high for the other side",
    "saves_per_epoch": "in steps",
    "val_set_size": "a share such as 0.05",
    "val_size": "a share such as 0.05",
    "use_wandb": "the section [wandb] turns it on",
    "scale_rewards": "dr_grpo, or grpo with advantage.args normalize = false, divides by no deviation",
    "scheduler.min_lr": "as a fraction of the peak",
    "bf16": "bfloat16",
    "fp16": "float32 or bfloat16",
    "adam_beta1": "both values: 0.9 0.95",
    "adam_beta2": "both values: 0.9 0.95",
    "optim.betas1": "both values: 0.9 0.95",
    "optim.betas2": "both values: 0.9 0.95",
    "resume": "latest, auto, or the path of a step_N folder",
    "resume.dir": "the path of a step_N folder",
    "loss.dppo_mask_low": "with loss.type = mask; a ratio, not a difference",
    "loss.dppo_mask_high": "with loss.type = mask; a ratio, not a difference",
    "gpu_memory_utilization": "in bytes, such as 4G",
    "save_only_model": "false saves weights only",
    "greater_is_better": "min or max",
    "resume_mode": "latest, auto, or the path of a step_N folder",
    "resume_path": "the path of a step_N folder",
}
"""How the setting here differs, by the names in `RENAMED`."""

ROWS = "metrics.jsonl in the output folder has a row for every step"
TRACKERS = (
    "{wandb.} sends metrics to Weights & Biases ({wandb.mode} offline works without a network), and "
    "metrics.jsonl in the output folder has them in any case; there are no other trackers"
)
VALIDATED = (
    "{?validation}[[validation]] tables in a file say what is validated and after how many steps (interval, "
    "at_start); see docs/training.md#validation"
)
EVALUATED = (
    "{?eval}[[eval]] tables in a file say what is evaluated and after how many steps (interval); see "
    "docs/training.md#evaluation"
)
PACKED = "samples are always packed into rows of {seq_len} tokens"
SHARDED = (
    "FSDP2 is always on with several {workers}: it shards parameters, gradients and optimiser state over all"
)
LOADED = "records are read and tokenised by the trainer's ranks; there is nothing to set"
QUANTISED = (
    "models are trained in float32 or bfloat16 ({precision.compute}); {lora.rank}, or {optimizer.type} "
    "adamw_8bit, saves memory"
)
PUSHED = "there is no upload to the hub: `ckpt export` writes a folder, and `hf upload` uploads it"
UNSAFE = "code from a model's repository is never run"
TEMPLATE = "the model's own chat template is used; put another one into chat_template.jinja of its folder"
ALGORITHM = (
    "there is no such option; docs/algorithms.md lists the losses and advantages, and {loss.type} "
    "module:Class is one of your own"
)
SAMPLED = (
    "a policy is trained on the very distribution that it is sampled from; {sampling.temperature} is its "
    "only setting"
)
SERVED = "the server takes vLLM's options with {vllm_args}"
CLIENT = "the server is a process of its own, which `rl` starts or {inference_url} names"

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "logging_steps logging_strategy logging_first_step logging_dir log_interval log_every "
        "log_every_n_steps logging_nan_inf_filter log_level log_level_replica log_on_each_node "
        "disable_tqdm include_num_input_tokens_seen skip_memory_metrics debug plot_loss "
        "log_multimodal log_unique_prompts num_completions_to_print log_completions_hub_repo",
        (ROWS,),
    ),
    (
        "report_to log_with trainer.logger use_tensorboard use_swanlab use_mlflow tensorboard "
        "trackio_space_id trackio_bucket_id trackio_static_space_id wandb_entity",
        (TRACKERS,),
    ),
    (
        "eval_steps eval_strategy evaluation_strategy eval_interval eval_every do_eval "
        "eval_on_start eval_delay eval_dataset evals_per_epoch per_device_eval_batch_size "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "batch_eval_metrics prediction_loss_only include_for_metrics bf16_full_eval "
        "fp16_full_eval do_train do_predict eval_packing num_generations_eval trainer.test_freq "
        "trainer.val_before_train data.val_files eval_batch_size",
        (VALIDATED, EVALUATED),
    ),
    (
        "packing padding_free sample_packing pad_to_sequence_len packing_strategy pad_to_multiple_of "
        "packing_samples neat_packing group_by_length length_column_name train_sampling_strategy "
        "remove_unused_columns pad_token",
        (PACKED,),
    ),
    (
        "deepspeed fsdp fsdp_config zero_stage accelerator_config parallelism_config "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank average_tokens_across_devices "
        "ds3_gather_for_generation actor_rollout_ref.actor.strategy",
        (SHARDED,),
    ),
    (
        "dataloader_num_workers dataloader_drop_last dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order preprocessing_num_workers "
        "dataset_num_proc dataset_prepared_path ignore_data_skip save_on_each_node "
        "enable_jit_checkpoint restore_callback_states_from_checkpoint overwrite_output_dir "
        "overwrite_cache use_cache torch_empty_cache_steps",
        (LOADED,),
    ),
    (
        "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant "
        "bnb_4bit_quant_storage quantization_bit use_dora lora_target_parameters lora_task_type",
        (QUANTISED,),
    ),
    (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        (PUSHED,),
    ),
    (
        "trust_remote_code",
        (UNSAFE,),
    ),
    (
        "chat_template chat_template_path template eos_token dataset_text_field dataset_kwargs "
        "input_key apply_chat_template chat_template_kwargs label_names",
        (TEMPLATE,),
    ),
    (
        "neftune_noise_alpha label_smoothing_factor disable_dropout lr_scheduler_kwargs "
        "optim_args optim_target_modules sync_ref_model ref_model_mixup_alpha "
        "ref_model_sync_steps top_entropy_quantile use_adaptive_entropy entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg multi_objective_aggregation "
        "discopop_tau ld_alpha f_divergence_type f_alpha_divergence_coef loss_weights "
        "use_weighting center_rewards_coefficient",
        (ALGORITHM,),
    ),
    (
        "top_k top_p min_p repetition_penalty generation_kwargs cache_implementation "
        "actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.top_p",
        (SAMPLED,),
    ),
    (
        "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_model_impl enforce_eager vllm_group_port",
        (SERVED,),
    ),
    (
        "use_vllm actor_rollout_ref.rollout.name use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config",
        (CLIENT,),
    ),
    (
        "gradient_accumulation_steps accumulate_grad_batches",
        ("a step's samples are split into as many micro-batches as they need",),
    ),
    (
        "auto_find_batch_size",
        ("{micro_batch_size} rows are computed at a time; --dry-run says how much memory they take",),
    ),
    ("gradient_checkpointing_kwargs", ("{activation_checkpointing} has no further options",)),
    ("torch_compile_backend torch_compile_mode", ("{compile} has no further options",)),
    (
        "use_liger_kernel liger_kernel_config",
        ("the loss holds a bounded part of the logits at a time; there is nothing to set",),
    ),
    ("tf32", ("{precision.float32_matmul} high allows it",)),
    (
        "precompute_ref_log_probs precompute_ref_batch_size",
        ("the reference scores all records once, before the first step (docs/preferences.md)",),
    ),
    ("model_init_kwargs", ("{precision.compute}, {attention} and {model.config} are such options",)),
    ("model_revision", ("give a folder: `hf download NAME --revision REVISION` makes one",)),
    (
        "steps_per_generation",
        ("{updates_per_batch} and {mini_batches} say how often a batch is learned from",),
    ),
    ("reward_weights", ("an environment gives its parts their weights; see docs/environments.md",)),
    (
        "max_tool_calling_iterations",
        ("an environment says how many turns there are; see docs/environments.md",),
    ),
    ("num_nodes", ("{slurm.nodes} of a Slurm job; see docs/clusters.md",)),
    (
        "activation_offloading",
        ("activations stay on the device; {activation_checkpointing} keeps fewer of them",),
    ),
    (
        "adapter_name_or_path",
        ("{model.name} takes whole models: merge the adapter first (`ckpt import` does; docs/lora.md)",),
    ),
)
"""Names used elsewhere that have no setting here, and what there is instead; see `MISSING`."""

MISSING = {name: texts for names, texts in GROUPS for name in names.split()}
"""Names used elsewhere that have no setting here, and what there is instead.

Of several texts the first applies whose settings the command has. `{a.b}` becomes the flag of a setting,
`{a.}` that of its section, and `{?a.b}` nothing: it says only that the command must have the setting.
"""

BATCH_SIZES = ("batch_size", "per_device_train_batch_size", "train_batch_size", "data.train_batch_size")
"""Names of the number of samples in a step."""
