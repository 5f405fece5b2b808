"""The same run with TRL's SFTTrainer: python with_trl.py SETTINGS SEED OUT

It gets the tokens of Cairn's batches in their order, so that what differs is the trainer. Its losses go to
OUT/metrics.jsonl, and that of the held-out records to OUT/evals.jsonl, as Cairn's do.
"""

import json
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from cairn.config.trainer import SFTDataConfig
from cairn.trainer.data.batches import SFTData


class Noted(TrainerCallback):
    """Writes the loss and the gradients' norm of each step."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            row = {"step": state.global_step, "loss": logs["loss"], "grad_norm": logs.get("grad_norm")}
            with self.path.open("a") as file:
                print(json.dumps(row), file=file)


@torch.no_grad()
def held_out(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> float:
    """The mean of -log p over the learned tokens of the held-out records, in nats."""
    (validation,) = settings["validation"]
    how = {"shuffle": False, "batch_size": 1, "too_long": settings["data"]["too_long"]}
    data = SFTData(
        SFTDataConfig(**validation["data"], **how), tokenizer, 0, 0, row_length=settings["seq_len"]
    )
    model.eval()
    total, count = 0.0, 0
    while data.position < validation["records"]:
        taken = data.next_batch(0)
        for sample in taken.samples if data.position <= validation["records"] else []:
            ids = torch.as_tensor(sample.token_ids).long()
            learned = torch.as_tensor(sample.loss_mask).bool()[1:]
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            total -= float(logprobs.gather(-1, ids[1:, None])[learned, 0].double().sum())
            count += int(learned.sum())
    return total / count


def main(settings: dict[str, Any], seed: int, out: Path) -> None:
    torch.set_num_threads(1)  # as Cairn's ranks have
    tokenizer = AutoTokenizer.from_pretrained(Path(settings["model"]["name"]) / "model")
    config = SFTDataConfig(**settings["data"])
    data = SFTData(config, tokenizer, seed, 0, row_length=settings["seq_len"])
    rows = [
        {"input_ids": sample.token_ids.tolist(), "assistant_masks": sample.loss_mask.astype(int).tolist()}
        for step in range(1, settings["max_steps"] + 1)
        for sample in data.next_batch(step).samples
    ]
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "evals.jsonl"):
        (out / name).unlink(missing_ok=True)
    set_seed(seed)
    rows_at_once = settings["micro_batch_size"]
    arguments = SFTConfig(
        output_dir=str(out / "trl"),
        max_steps=settings["max_steps"],
        max_length=settings["seq_len"],
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=config.batch_size // rows_at_once,
        learning_rate=settings["optimizer"]["lr"],
        adam_beta1=settings["optimizer"]["betas"][0],
        adam_beta2=settings["optimizer"]["betas"][1],
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        seed=seed,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        Path(settings["model"]["name"]) / "model", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(fnmatchcase(name, pattern) for pattern in settings["freeze"])
    SFTTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Noted(out / "metrics.jsonl")],
    ).train()
    row = {
        "step": settings["max_steps"],
        "name": "held_out",
        "loss": held_out(model, tokenizer, settings),
    }
    (out / "evals.jsonl").write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tomllib.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), Path(sys.argv[3]))
