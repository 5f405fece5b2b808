"""Configuration of the trainer: what SFT and RL share, and what is their own."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from cairn.config.base import BaseConfig
from cairn.config.loss import ClipConfig, LikelihoodConfig, LossConfig, PolicyLossConfig, SFTLossConfig
from cairn.config.shared import SharedConfig
from cairn.config.supervision import SupervisionConfig


class OptimizerConfig(BaseConfig):
    """AdamW."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, applied to matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global L2 norm to which larger gradients are scaled down."""


class SchedulerConfig(BaseConfig):
    """Learning rate over steps: linear warm-up, then the named shape."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly to its peak."""
    steps: int | None = Field(default=None, ge=1)
    """Step at which linear and cosine end, independent of max_steps; default: max_steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a fraction of the peak."""


class PrecisionConfig(BaseConfig):
    """FSDP2's mixed precision policy; master weights and optimiser state stay float32."""

    compute: Literal["float32", "bfloat16"] = "float32"
    """Data type of parameters and activations in forward and backward."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are reduced across ranks."""


class RayConfig(BaseConfig):
    """The Ray cluster that the trainer's workers run on."""

    address: str | None = None
    """Address of a running cluster; default: start a local one."""
    start_timeout: float = Field(default=300, gt=0)
    """Seconds to wait for workers to be placed and started."""


class WandbConfig(BaseConfig):
    """Weights & Biases tracking."""

    project: str = "cairn"
    """Project to log to."""
    name: str | None = None
    """Name of the run; default: the output folder's name."""
    mode: Literal["online", "offline"] = "online"
    """online needs a login; offline writes to the output folder, to be synced later."""


class TrainerBase(SharedConfig, SupervisionConfig):
    """What every trainer has."""

    task: ClassVar[str]
    """What the configuration is for: a name in `cairn.trainer.tasks`."""
    beside_servers: ClassVar[bool] = False
    """Whether servers may use the same processor."""
    workers: int = Field(default=1, ge=1)
    """Trainer ranks: one process each, one GPU each where there are GPUs."""
    spare_workers: int = Field(default=0, ge=0)
    """Idle workers with everything imported, to replace one that dies within a second or two."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank."""
    seq_len: int = Field(default=2048, ge=2)
    """Longest row of a micro-batch, in tokens; samples are packed into rows, longer ones are cut."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Rows of seq_len tokens (or as many tokens in shorter rows) in one forward and backward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass, to save memory."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on GPUs, and no difference on CPUs."""
    ray: RayConfig = RayConfig()
    wandb: WandbConfig | None = None

    @property
    def records(self) -> "SFTDataConfig | None":
        """The records that it trains on; None if batches come from an orchestrator."""
        return None

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is a class of the user's own."""
        return None

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainerBase":
        end = self.scheduler.steps or self.max_steps
        if self.scheduler.type != "constant" and self.scheduler.warmup_steps >= end:
            raise ValueError(
                f"scheduler.warmup_steps = {self.scheduler.warmup_steps} leaves no step for the "
                f"{self.scheduler.type} schedule, which ends at step {end}; lower it or raise scheduler.steps"
            )
        return self


class SFTDataConfig(BaseConfig):
    """Records with `messages`, or with `prompt` and `completion`."""

    name: str = ""
    """A .jsonl, .json, .parquet or .csv file, a folder of them or from save_to_disk, or a hub name."""
    split: str = "train"
    """Split to train on; a part of it as train[:1000]. A single file has only train."""
    batch_size: int = Field(default=64, ge=1)
    """Records in one optimiser step, over all ranks."""
    shuffle: bool = True
    """Use a new seeded order in every epoch instead of the file's order."""


class SFTConfig(TrainerBase):
    """Supervised fine-tuning on Ray-launched FSDP2 workers."""

    task = "sft"
    output_dir: str = Field(default="outputs/sft", validate_default=True)
    """Folder for everything that the run writes."""
    data: SFTDataConfig = SFTDataConfig()
    loss: SFTLossConfig = LikelihoodConfig()

    @property
    def records(self) -> SFTDataConfig:
        return self.data

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is a class of the user's own."""
        return self.loss if self.loss.is_own else None


class TrainerConfig(TrainerBase):
    """The trainer of an RL run: reads the orchestrator's batches, publishes policy versions."""

    task = "rl"
    beside_servers = True
    loss: PolicyLossConfig = ClipConfig()
    weight_transport: Literal["files", "network"] = "files"
    """How servers get policies: from files, or from the trainer's memory over NCCL (GPUs) or gloo."""
    batch_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for the orchestrator's next batch."""

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is a class of the user's own."""
        return self.loss if self.loss.is_own else None
