"""All tasks, by the name that a configuration class gives in `task`."""

from cairn.config.trainer import TrainerBase
from cairn.trainer.dpo import DPO
from cairn.trainer.models.reward_model import Reward
from cairn.trainer.rl import RL
from cairn.trainer.sft import SFT
from cairn.trainer.task import Context, Task

TASKS: dict[str, type[Task]] = {"sft": SFT, "dpo": DPO, "reward": Reward, "rl": RL}


def task_class(config: TrainerBase) -> type[Task]:
    """The class of the task that a configuration is for."""
    return TASKS[config.task]


def make_task(config: TrainerBase, context: Context) -> Task:
    """The task that a configuration is for; all ranks call it."""
    return task_class(config)(config, context)
