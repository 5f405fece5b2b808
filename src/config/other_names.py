"""Names from other trainers, and what they are called here.

The names of TRL and the transformers Trainer, prime-rl, verl, OpenRLHF, axolotl, LLaMA-Factory, SkyRL and
Telescope, with underscores. `hints.py` reads these tables.
"""

ELSEWHERE: dict[str, str] = {
    "optimizer.lr": (
        "lr learning_rate optim.lr actor_rollout_ref.actor.optim.lr actor_learning_rate optimizer_config.lr"
    ),
    "optimizer.type": "optim optimizer_name",
    "optimizer.momentum": "momentum",
    "optimizer.betas": "adam_beta1 adam_beta2 optim.betas1 optim.betas2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay optim.weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm optim.max_norm actor_rollout_ref.actor.grad_clip",
    "scheduler.type": "lr_scheduler_type",
    "scheduler.warmup_steps": "warmup_steps warmup_ratio",
    "activation_checkpointing": (
        "gradient_checkpointing model.ac actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "compile": "torch_compile model.compile",
    "deterministic": "full_determinism",
    "seed": "data_seed",
    "attention": "attn_implementation flash_attn",
    "router_aux_coef": "router_aux_loss_coef",
    "precision.head": "cast_lm_head_to_fp32",
    "gpus": "use_cpu",
    "loss.label_smoothing": "label_smoothing",
    "loss.beta|kl.coef": "beta",
    "data.learn": "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt loss_mask",
    "data.shuffle": "shuffle_dataset",
    "data.too_long": "truncation_mode",
    "data.held_out": "test_split_size val_set_size val_size",
    "lora.rank": "use_peft lora_r lora_rank finetuning_type",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target_modules lora_target lora_target_linear",
    "lora.modules_to_save": "lora_modules_to_save",
    "lora.rslora": "use_rslora",
    "wandb.project": "project monitors.wandb.project trainer.project_name wandb_project",
    "kl.reference": "ref_model",
    "precision.compute": "bf16 fp16 torch_dtype model.optimization_dtype",
    "seq_len": "max_length max_seq_length model.seq_len data.seq_len max_len sequence_len cutoff_len",
    "model.name": (
        "model_name_or_path actor_rollout_ref.model.path policy.model.path pretrain base_model model"
    ),
    "data.name|environment.name": "dataset_name data.train_files data dataset",
    "data.split": "dataset_train_split data.splits",
    "data.epochs|max_steps": "num_train_epochs num_epochs epochs trainer.total_epochs max_epochs",
    "inference.dtype|precision.compute": "dtype",
    "max_steps": "steps trainer.total_training_steps max_training_steps num_episodes",
    "ckpt.interval": (
        "save_steps trainer.save_freq saves_per_epoch checkpoint_every ckpt_interval save_strategy save_every"
    ),
    "ckpt.keep_last": (
        "save_total_limit trainer.max_actor_ckpt_to_keep max_ckpt_num checkpoint_keep_last max_ckpts_to_keep"
    ),
    "ckpt.resume": (
        "resume_from_checkpoint resume resume.dir trainer.resume_mode load_checkpoint resume_mode resume_path"
    ),
    "wandb.name": "run_name monitors.wandb.name trainer.experiment_name wandb_run_name wandb_name",
    "samples_per_prompt": (
        "num_generations group_size rollouts_per_example actor_rollout_ref.rollout.n n_samples_per_prompt"
    ),
    "updates_per_batch": "num_iterations actor_rollout_ref.actor.ppo_epochs update_epochs_per_batch",
    "sampling.temperature": "temperature actor_rollout_ref.rollout.temperature",
    "sampling.max_tokens": (
        "max_new_tokens max_completion_length sampling.max_completion_tokens data.max_response_length "
        "generate_max_len max_generate_length"
    ),
    "prompts_per_step": "generation_batch_size rollout_batch_size",
    "overlong.type": "mask_truncated_completions",
    "kl.unbiased": "use_bias_correction_kl",
    "environment.name": "reward_funcs env.id custom_reward_function.path prompt_data remote_rm_url",
    "colocate": "vllm_mode colocate_all_models colocate_all",
    "servers": "num_inference_engines num_engines",
    "redraw": "filter_groups.enable dynamic_sampling.type",
    "kl.place": "use_kl_in_reward",
    "backend": "trainer.strategy",
    "inference_url": "vllm_server_port vllm_server_host vllm_server_base_url vllm_num_engines",
    "server_timeout": "vllm_server_timeout",
    "tensor_parallel": (
        "vllm_tensor_parallel_size actor_rollout_ref.rollout.tensor_model_parallel_size tensor_parallel_size "
        "inference_engine_tensor_parallel_size"
    ),
    "kv_cache_memory": (
        "vllm_gpu_memory_utilization actor_rollout_ref.rollout.gpu_memory_utilization gpu_memory_utilization"
    ),
    "keep_rollouts_gb": "log_completions",
    "loss.clip_low": (
        "epsilon actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio eps_clip "
        "eps_clip_low"
    ),
    "loss.clip_high": "epsilon_high actor_rollout_ref.actor.clip_ratio_high eps_clip_high",
    "loss.dual_clip": "delta actor_rollout_ref.actor.clip_ratio_c",
    "loss.type": "loss_type importance_sampling_level pref_loss policy_loss_type",
    "loss.tau_pos": "sapo_temperature_pos",
    "loss.tau_neg": "sapo_temperature_neg",
    "loss.entropy_coef": "entropy_coef actor_rollout_ref.actor.entropy_coeff",
    "loss.importance": (
        "vllm_importance_sampling_mode vllm_importance_sampling_correction "
        "algorithm.rollout_correction.rollout_is"
    ),
    "loss.importance_max": (
        "vllm_importance_sampling_clip_max algorithm.rollout_correction.rollout_is_threshold"
    ),
    "loss.importance_min": "vllm_importance_sampling_clip_min",
    "advantage.type": "scale_rewards algorithm.adv_estimator advantage_estimator",
    "max_model_len": "vllm_max_model_length data.max_prompt_length prompt_max_len",
    "max_off_policy_steps": "max_staleness",
    "max_in_flight": "max_inflight_tasks concurrency.max_inflight",
    "scheduler.steps": "scheduler.decay_steps",
    "scheduler.min_lr_ratio": "scheduler.min_lr",
    "ckpt.keep_every": "keep_interval checkpoint_keep_every",
    "ckpt.resume_step": "resume.step resume_step",
    "output_dir": "run.name trainer.default_local_dir save_path output",
    "weight_transport": "weight_broadcast.type",
    "replicas": "dp_replicate model.dp_replicate",
    "parallel.tensor": "model.tp tp_size actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "parallel.expert": "model.ep ep_size actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "parallel.pipeline": "model.pp pp_size actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "parallel.context": "model.cp cp_size context_parallel_size ulysses_sequence_parallel_size",
    "precision.reduce": "model.reduce_dtype",
    "environments": "train.source",
    "loss.delta_low": "loss.dppo_mask_low",
    "loss.delta_high": "loss.dppo_mask_high",
    "loss.aggregation": "actor_rollout_ref.actor.loss_agg_mode",
    "kl.coef": (
        "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef "
        "algorithm.kl_ctrl.kl_coef init_kl_coef use_kl_loss kl_loss_coef"
    ),
    "kl.estimator": "actor_rollout_ref.actor.kl_loss_type",
    "mini_batches": "actor_rollout_ref.actor.ppo_mini_batch_size policy_mini_batch_size",
    "critic.gamma": "algorithm.gamma gamma",
    "critic.gae_lambda": "algorithm.lam lambd",
    "critic.optimizer.lr": "critic.optim.lr critic_learning_rate",
    "slurm.gpus_per_node|workers": "trainer.n_gpus_per_node",
    "slurm.nodes": "trainer.nnodes",
    "ckpt.dir": "ckpt_path checkpoint_dir",
    "wandb.mode": "use_wandb wandb_mode",
    "micro_batch_size": "micro_batch_size_per_gpu",
    "data.sets|data.name": "datasets",
    "validation": "test_datasets early_stopping_patience",
    "loss.beta": "pref_beta",
    "data.name": "dataset_dir",
    "ckpt.training_state": "checkpoint_save_training_state save_only_model",
    "ckpt.keep_best": "load_best_model_at_end",
    "ckpt.metric": "metric_for_best_model",
    "ckpt.mode": "greater_is_better",
    "workers": "gpus num_gpus world_size",
}
"""The last keys of a setting here, or of several, of which the first counts that the command has; and its
names elsewhere."""
RENAMED = {name: here for here, names in ELSEWHERE.items() for name in names.split()}
"""The same by the name used elsewhere."""

NOTES_OF: dict[str, str] = {
    "warmup_ratio saves_per_epoch": "in steps",
    "optim optimizer_name": "adamw, adamw_8bit, muon, sgd or lion",
    "use_cpu": "0 for none",
    "use_peft": "the section [lora] turns adapters on",
    "finetuning_type": "[lora] trains an adapter, freeze leaves weights out, neither trains all",
    "attn_implementation flash_attn": "auto, dense, varlen or flex",
    "assistant_only_loss completion_only_loss": "the default: the turns of the assistant",
    "train_on_inputs train_on_prompt loss_mask": (
        "roles whose turns are learned, such as system user assistant"
    ),
    "test_datasets": "[[validation]] tables in a file",
    "early_stopping_patience": "patience of a [[validation]] table in a file",
    "vllm_server_port vllm_server_host": "the address, such as http://127.0.0.1:8000",
    "vllm_num_engines": "the address of each server",
    "vllm_gpu_memory_utilization actor_rollout_ref.rollout.gpu_memory_utilization gpu_memory_utilization": (
        "in bytes, such as 4G"
    ),
    "mask_truncated_completions": "mask leaves answers that were cut off out of the loss",
    "log_completions": "all answers are kept; the command rollouts shows them",
    "custom_reward_function.path reward_funcs remote_rm_url": (
        "an environment holds the reward, such as my_env:Sums"
    ),
    "prompt_data": "an environment holds the problems, such as my_env:Sums",
    "data.max_prompt_length prompt_max_len": "a prompt and its answer together",
    "generation_batch_size rollout_batch_size": "each with as many answers as samples-per-prompt says",
    "actor_rollout_ref.actor.ppo_mini_batch_size policy_mini_batch_size": (
        "how many parts a batch is split into"
    ),
    "num_iterations": (
        "with trainer.mini-batches 1: then each update learns from the whole batch, as in TRL, and otherwise "
        "from a part of it"
    ),
    "vllm_importance_sampling_correction": "sequence_mask is what TRL does by default",
    "filter_groups.enable dynamic_sampling.type": "how many prompts of a step may be replaced",
    "use_kl_in_reward": "reward",
    "actor_rollout_ref.actor.clip_ratio eps_clip": "and clip-high for the other side",
    "val_set_size val_size": "a share such as 0.05",
    "use_wandb": "the section [wandb] turns it on",
    "scale_rewards": "dr_grpo, or grpo with advantage.args normalize = false, divides by no deviation",
    "scheduler.min_lr": "as a fraction of the peak",
    "bf16": "bfloat16",
    "fp16": "float32 or bfloat16",
    "adam_beta1 adam_beta2 optim.betas1 optim.betas2": "both values: 0.9 0.95",
    "resume resume_mode": "latest, auto, or the path of a step_N folder",
    "resume.dir resume_path": "the path of a step_N folder",
    "loss.dppo_mask_low loss.dppo_mask_high": "with loss.type = mask; a ratio, not a difference",
    "save_only_model": "false saves weights only",
    "greater_is_better": "min or max",
}
"""How the setting here differs, by names in `RENAMED`."""
NOTES = {name: note for names, note in NOTES_OF.items() for name in names.split()}
"""The same by single names."""

ROWS = "metrics.jsonl in the output folder has a row for every step"
TRACKERS = (
    "{sinks.tensorboard.} writes event files for TensorBoard, {wandb.} sends metrics to Weights & Biases "
    "({wandb.mode} offline works without a network); docs/how-to/sinks.md has the others"
)
VALIDATED = (
    "{?validation}[[validation]] tables in a file say what is validated and after how many steps (interval, "
    "at_start); see docs/how-to/validation.md"
)
EVALUATED = (
    "{?eval}[[eval]] tables in a file say what is evaluated and after how many steps (interval); see "
    "docs/how-to/evaluation.md"
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
    "there is no such option; docs/reference/algorithms.md lists the losses and advantages, and {loss.type} "
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
        "eval_steps eval_strategy evaluation_strategy eval_interval eval_every do_eval eval_on_start "
        "eval_delay eval_dataset evals_per_epoch per_device_eval_batch_size eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics prediction_loss_only "
        "include_for_metrics bf16_full_eval fp16_full_eval do_train do_predict eval_packing "
        "num_generations_eval trainer.test_freq trainer.val_before_train data.val_files eval_batch_size",
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
        "dataloader_num_workers dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "preprocessing_num_workers dataset_num_proc dataset_prepared_path ignore_data_skip save_on_each_node "
        "enable_jit_checkpoint restore_callback_states_from_checkpoint overwrite_output_dir overwrite_cache "
        "use_cache torch_empty_cache_steps",
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
    ("trust_remote_code", (UNSAFE,)),
    (
        "chat_template chat_template_path template eos_token dataset_text_field dataset_kwargs "
        "input_key apply_chat_template chat_template_kwargs label_names",
        (TEMPLATE,),
    ),
    (
        "neftune_noise_alpha label_smoothing_factor disable_dropout lr_scheduler_kwargs optim_args "
        "optim_target_modules sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile "
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target "
        "off_policy_mask_threshold vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
        "multi_objective_aggregation discopop_tau ld_alpha f_divergence_type f_alpha_divergence_coef "
        "loss_weights use_weighting center_rewards_coefficient",
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
        ("the reference scores all records once, before the first step (docs/how-to/preferences.md)",),
    ),
    ("model_init_kwargs", ("{precision.compute}, {attention} and {model.config} are such options",)),
    ("model_revision", ("give a folder: `hf download NAME --revision REVISION` makes one",)),
    (
        "steps_per_generation",
        (
            "{mini_batches} is steps_per_generation / gradient_accumulation_steps, and {updates_per_batch} "
            "that times num_iterations",
        ),
    ),
    ("reward_weights", ("an environment gives its parts their weights; see docs/how-to/programs.md",)),
    (
        "max_tool_calling_iterations",
        ("an environment says how many turns there are; see docs/how-to/tools.md",),
    ),
    ("num_nodes", ("{slurm.nodes} of a Slurm job; see docs/how-to/slurm.md",)),
    (
        "activation_offloading",
        ("activations stay on the device; {activation_checkpointing} keeps fewer of them",),
    ),
    (
        "adapter_name_or_path",
        (
            "{model.name} takes whole models: merge the adapter first (`ckpt import` does; "
            "docs/how-to/formats-peft.md)",
        ),
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
