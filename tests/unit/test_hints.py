"""What a wrong flag is answered with: typing errors, and the names of other trainers."""

import dataclasses
import re
import string

import draws
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.config.cli import COMMANDS, hidden_settings, load
from cairn.config.hints import unknown_setting
from cairn.config.other_names import BATCH_SIZES, MISSING, RENAMED
from cairn.config.settings import settings_of
from cairn.run.errors import UsageError

TRL = {
    "sft": "model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field "
    "dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing "
    "packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss "
    "loss_type activation_offloading pad_token model_name_or_path attn_implementation use_peft lora_r "
    "lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora load_in_4bit",
    "dpo": "learning_rate beta label_smoothing precompute_ref_log_probs loss_type sync_ref_model "
    "disable_dropout ld_alpha max_length",
    "rl": "num_generations max_completion_length temperature top_p top_k min_p repetition_penalty "
    "use_vllm vllm_mode vllm_server_base_url vllm_gpu_memory_utilization vllm_tensor_parallel_size beta "
    "num_iterations epsilon delta epsilon_high importance_sampling_level scale_rewards loss_type "
    "mask_truncated_completions reward_weights steps_per_generation entropy_coef log_completions "
    "use_bias_correction_kl learning_rate vllm_importance_sampling_correction vllm_importance_sampling_mode",
}
"""Fields of TRL 1.13's SFTConfig, ModelConfig, DPOConfig and GRPOConfig."""
OTHERS = {
    "sft": "base_model sequence_len micro_batch_size num_epochs val_set_size sample_packing wandb_project "
    "cutoff_len lora_rank lora_target finetuning_type flash_attn zero_stage pretrain max_epochs max_len "
    "bf16 template overwrite_output_dir preprocessing_num_workers use_wandb eval_steps save_steps",
    "rl": "actor_rollout_ref.model.path actor_rollout_ref.rollout.n data.train_files "
    "data.max_response_length trainer.total_epochs trainer.save_freq trainer.test_freq trainer.logger "
    "algorithm.adv_estimator actor_rollout_ref.actor.kl_loss_coef n_samples_per_prompt rollout_batch_size "
    "advantage_estimator generate_max_len init_kl_coef eps_clip vllm_num_engines remote_rm_url "
    "colocate_all_models",
}
"""Flags of axolotl, LLaMA-Factory, OpenRLHF and verl."""
LETTERS = string.ascii_lowercase + "_"


def said(command: str, name: str, value: object = "x") -> str:
    root = settings_of(COMMANDS[command])
    return unknown_setting(tuple(name.split(".")), root, hidden_settings(root), value)


def flags_in(text: str) -> set[str]:
    return {flag.rstrip(".?;,)").replace("-", "_") for flag in re.findall(r"(?<=--)[\w.-]+", text)}


@st.composite
def typing_errors(draw: st.DrawFn) -> tuple[str, str, str]:
    """A command, one of its settings, and this with one letter wrong."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    root = settings_of(COMMANDS[command])
    hidden = hidden_settings(root)
    names = sorted(".".join(leaf.path) for leaf in root.leaves() if leaf.path not in hidden)
    name = draw(st.sampled_from(names))
    at = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(LETTERS))
    edits = {
        "delete": name[:at] + name[at + 1 :],
        "insert": name[:at] + letter + name[at:],
        "replace": name[:at] + letter + name[at + 1 :],
        "exchange": name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :],
    }
    return command, name, edits[draw(st.sampled_from(sorted(edits)))]


@pytest.mark.slow
@given(typing_errors())
@settings(max_examples=600, deadline=None)
def test_a_flag_with_one_wrong_letter_is_suggested(case: tuple[str, str, str]):
    command, name, typed = case
    root = settings_of(COMMANDS[command])
    elsewhere = {*RENAMED, *MISSING, *BATCH_SIZES}
    if root.find(tuple(typed.split("."))) or typed in elsewhere or not typed:
        return
    assert name in flags_in(said(command, typed)), (typed, said(command, typed))


@pytest.mark.parametrize(
    ("command", "name", "meant"),
    [
        ("sft", "lerning_rate", "did you mean --optimizer.lr?"),
        ("sft", "learnig_rate", "did you mean --optimizer.lr?"),
        ("rl", "num_generation", "did you mean --orchestrator.samples-per-prompt?"),
        ("sft", "grad_acumulation_steps", "--help lists all settings"),
        ("sft", "gradient_acumulation_steps", "gradient-accumulation-steps: a step's samples are split"),
        ("sft", "eval_steps", "[[validation]] tables in a file"),
        ("rl", "eval_steps", "[[eval]] tables in a file"),
        ("sft", "report_to", "--sinks.tensorboard writes event files for TensorBoard"),
        (
            "rl",
            "report_to",
            "--trainer.wandb sends metrics to Weights & Biases (--trainer.wandb.mode offline",
        ),
        ("inference", "report_to", "--help lists all settings"),
        ("sft", "temprature", "--help lists all settings"),
        ("rl", "temprature", "did you mean --orchestrator.sampling.temperature?"),
        ("rl", "dtype", "did you mean --inference.dtype?"),
        ("sft", "dtype", "did you mean --precision.compute?"),
        ("sft", "push_to_hub", "`ckpt export` writes a folder"),
        ("sft", "maxsteps", "did you mean --max-steps?"),
        (
            "rl",
            "num_iterations",
            "--trainer.updates-per-batch? (with trainer.mini-batches 1: then each update",
        ),
        ("rl", "steps_per_generation", "--trainer.updates-per-batch that times num_iterations"),
        ("sft", "xyz", "--help lists all settings"),
    ],
)
def test_what_is_said(command: str, name: str, meant: str):
    assert meant in said(command, name)


def _answered(command: str, name: str) -> None:
    """By a setting of the same name, or by what the tables say of it; never by a name that looks alike."""
    root = settings_of(COMMANDS[command])
    keys = tuple(name.split("."))
    same = root.find(keys) or [leaf for leaf in root.leaves() if leaf.path[-1] == keys[-1]]
    known = name in RENAMED or name in MISSING or name in BATCH_SIZES
    assert same or known, f"{command} --{name}: {said(command, name)}"
    assert root.find(keys) or "--help lists all" not in said(command, name), f"{command} --{name}"


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_every_setting_of_the_transformers_trainer_has_an_answer(command: str):
    from transformers import TrainingArguments

    for field in dataclasses.fields(TrainingArguments):
        if command == "sft" or field.name not in ("label_smoothing_factor", "num_train_epochs"):
            _answered(command, field.name)


@pytest.mark.parametrize(("command", "names"), [*TRL.items(), *OTHERS.items()])
def test_names_of_other_trainers_have_an_answer(command: str, names: str):
    for name in names.split():
        _answered(command, name)


@pytest.mark.slow
@pytest.mark.parametrize("command", draws.cases(sorted(COMMANDS), "answers", 3))
def test_answers_name_settings_of_the_command(command: str):
    root = settings_of(COMMANDS[command])
    known = {".".join(leaf.path) for leaf in root.leaves() if leaf.path not in hidden_settings(root)}
    sections = {name.rpartition(".")[0] for name in known}
    for name in [*RENAMED, *MISSING, *BATCH_SIZES]:
        if not root.find(tuple(name.split("."))):
            text = said(command, name)
            assert flags_in(text) <= known | sections | {"help", "dry_run", "revision"}, (name, text)
            assert "{" not in text


def test_in_a_file_as_well(tmp_path):
    (tmp_path / "x.toml").write_text('report_to = "tensorboard"\n')
    with pytest.raises(UsageError, match=r"--sinks\.tensorboard writes event files"):
        load(COMMANDS["sft"], ["@", str(tmp_path / "x.toml")])
