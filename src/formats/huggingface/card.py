"""Writes the model card of an exported model: a README.md with the header that the Hugging Face hub reads."""

import json
import re

from cairn.formats.base import Content

FILE_NAME = "README.md"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
METHODS = {
    "sft": "supervised fine-tuning (SFT)",
    "dpo": "learning from preferences (DPO and its relatives)",
    "reward": "training a reward model",
    "reinforcement-learning": "reinforcement learning (RL)",
}
"""What made the weights: the hub's tag, and in words."""


def model_card(content: Content, dtype: str | None) -> str:
    """The card: base model, how the weights were made, and the settings, as far as the step says.

    Args:
        dtype: torch's name of the data type that was asked for; None: as in training.
    """
    origin = content.origin
    base, method = origin.get("base"), origin.get("method")
    header = ["library_name: transformers", "pipeline_tag: text-generation"]
    if base and HUB_NAME.fullmatch(base):
        header.append(f"base_model: {base}")
    if data := [name for name in origin.get("data", "").split(", ") if HUB_NAME.fullmatch(name)]:
        header += ["datasets:", *(f"- {name}" for name in data)]
    header += ["tags:", "- cairn", *([f"- {method}"] if method else [])]
    step = f"step {content.step}" if content.step else "a step"
    lines = [f"The weights of {step} of a run of Cairn {origin.get('version', '')}".rstrip() + ".", ""]
    known = {
        "Base model": base,
        "Made by": METHODS.get(method or ""),
        "Data": origin.get("data"),
        "Samples trained on": content.samples,
        "Tokens trained on": content.tokens,
        "Optimiser": content.optimizer,
        "Data type": dtype,
        "Run": origin.get("run"),
        "Saved": origin.get("saved"),
    }
    lines += [f"- {name}: {value}" for name, value in known.items() if value]
    if content.settings:
        settings = [f"{name} = {json.dumps(value)}" for name, value in sorted(content.settings.items())]
        lines += ["", "## Settings of the run", "", "```", *settings, "```"]
    return "\n".join(["---", *header, "---", "", "# " + (base or "Model").rpartition("/")[2], "", *lines, ""])
