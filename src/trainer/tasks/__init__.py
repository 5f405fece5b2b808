"""All tasks, by the name that a configuration class gives in `task`."""

from cairn.config.trainer import TrainerBase
from cairn.trainer.state import Context
from cairn.trainer.tasks.dpo import DPOTask, Reward
from cairn.trainer.tasks.rl import RL
from cairn.trainer.tasks.sft import SFT
from cairn.trainer.tasks.task import Task

TASKS: dict[str, type[Task]] = {"sft": SFT, "dpo": DPOTask, "reward": Reward, "rl": RL}


def task_class(config: TrainerBase) -> type[Task]:
    """The class of the task that a configuration is for."""
    return TASKS[config.task]


def make_task(config: TrainerBase, context: Context) -> Task:
    """The task that a configuration is for; all ranks call it."""
    return task_class(config)(config, context)
