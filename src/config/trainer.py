"""Settings of the trainer: those that all kinds of training share, and those of SFT."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from cairn.config.data import HeldOutPart, SFTDataConfig, ValidationConfig
from cairn.config.loss import LikelihoodConfig, LossConfig, SFTLossConfig
from cairn.config.model import LoraConfig, PrecisionConfig
from cairn.config.optimizer import AdamWConfig, OptimizerConfig, SchedulerConfig, SpikeConfig
from cairn.config.parallel import ParallelConfig
from cairn.config.settings import AbsolutePath, BaseConfig, refuse_twins, separate
from cairn.config.shared import Gpus, SharedConfig, SlurmConfig, SupervisionConfig
from cairn.config.teachers import (
    AuxiliaryModel,
    KLConfig,
)


class RayConfig(BaseConfig):
    """The Ray cluster for the trainer's workers."""

    address: str | None = None
    """Address of a running Ray cluster (default: start one on this machine)."""
    start_timeout: float = Field(default=300, gt=0)
    """Seconds within which all workers must be placed and started."""


class WandbConfig(BaseConfig):
    """Weights & Biases tracking."""

    project: str = "cairn"
    """W&B project."""
    name: str | None = None
    """Name of the run in W&B (default: the name of the output folder)."""
    mode: Literal["online", "offline"] = "online"
    """online needs a login; offline writes into the output folder, for `wandb sync` later."""


class TrainerBase(SharedConfig, SupervisionConfig):
    """Settings that the trainers of SFT and RL share."""

    task: ClassVar[str]
    """The kind of training: a name in `cairn.trainer.tasks`."""
    loss_is_positive: ClassVar[bool] = False
    """Whether the loss has a mean that a spike of it can be compared with; a policy's loss is around 0."""
    beside_servers: ClassVar[bool] = False
    """Whether inference servers may run on the same CPUs."""
    workers: int | None = Field(default=None, ge=1)
    """Trainer ranks: one process each, with one GPU each (default: one for each of its GPUs, 1 on CPUs)."""
    gpus: Gpus = None
    """Its GPUs: how many, or which, such as 0,1 or GPU-5ab1; one alone: 3, (default: all but a server's)."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded model (HSDP), each on an equal part of the ranks; 1: sharded over all ranks."""
    parallel: ParallelConfig = ParallelConfig()
    backend: Literal["fsdp2", "megatron"] = "fsdp2"
    """What trains: PyTorch's FSDP2, or megatron-core, which is installed with its own dependency group."""
    spare_workers: int = Field(default=0, ge=0)
    """Idle processes with everything imported that replace dead ranks; on GPUs so many for each rank."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    seq_len: int = Field(default=2048, ge=2)
    """Maximum tokens of a row; samples are packed into rows, and longer samples are cut."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Rows of seq_len tokens, or as many in shorter rows, per pass (default: 1; on GPUs as many as fit)."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens per forward and backward pass, in place of micro_batch_size; a longer sample has one alone."""
    optimizer: OptimizerConfig = AdamWConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    spike: SpikeConfig = SpikeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: slower, but needs less memory."""
    keep_gathered: bool | None = None
    """Gather each layer once for its forward and backward pass (default: where GPUs have room for all)."""
    state_on: Literal["device", "host"] = "device"
    """host: weights, gradients and optimiser state in host memory, stepped by `threads` CPU threads: slow."""
    freeze: Annotated[list[str], AfterValidator(separate)] = []
    """Weights that are not trained: names in transformers, or patterns such as model.layers.[0-7].*"""
    lora: LoraConfig | None = None
    router_aux_coef: float | None = Field(default=None, ge=0)
    """Weight of a mixture of experts' load-balancing loss (default: as its config.json says; 0: without)."""
    attention: Literal["auto", "dense", "varlen", "flex"] = "auto"
    """How samples in a row stay apart: dense masks, or kernels for GPUs; auto takes what serves the model."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    deterministic: bool = False
    """Use deterministic kernels only: slower on GPUs, no difference on CPUs."""
    ray: RayConfig = RayConfig()
    wandb: WandbConfig | None = None

    def settled(self, *, gpu: bool, gpu_servers: bool = False) -> Self:
        return self.model_copy(update={"precision": self.precision.settled(gpu=gpu)})

    @property
    def ranks(self) -> int:
        """The number of ranks; `placing` has set `workers` where the user has not."""
        return self.workers or 1

    @property
    def counted_records(self) -> SFTDataConfig | None:
        """The records that give the length of the run (`epochs`); None if max_steps does."""
        return None

    @property
    def held_out_data(self) -> Mapping[str, SFTDataConfig]:
        """By name, the records of each validation, to be read one by one in their order."""
        return {}

    @property
    def together(self) -> int:
        """So many samples, each of up to seq_len tokens, are always in one micro-batch."""
        return 1

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is the user's own class."""
        return None

    @property
    def sends_adapter(self) -> bool:
        """Whether servers get an adapter as it is."""
        return False

    @property
    def shares_gpu(self) -> bool:
        """Whether a server is awake on the trainer's GPU between steps."""
        return False

    @property
    def replays_experts(self) -> bool:
        """Whether the policy's tokens pass through the experts that servers chose for them."""
        return False

    @property
    def publishes_first(self) -> bool:
        """Whether servers get the policy that a new run begins with from the trainer, not from its folder."""
        return False

    def keeps_published(self, *, gpu: bool) -> str | None:
        """The data type in which ranks on GPUs or CPUs keep the newest policy in host memory; None: they keep
        none."""
        return None

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        """The models that are trained beside the policy, by the section that describes them."""
        return {}

    @property
    def beside_policy(self) -> Self:
        """The settings of models beside the policy: FSDP2 lays these out, whatever lays out the policy."""
        if self.backend == "fsdp2":
            return self
        return self.model_copy(update={"backend": "fsdp2", "parallel": ParallelConfig()})

    def beginning_as(self, folders: Mapping[str, str]) -> Self:
        """With local folders, by section, in the place of the names of models beside the policy."""
        return self

    @property
    def kl_in_loss(self) -> KLConfig | None:
        """The penalty on the divergence from a reference that is a term of the loss."""
        return None

    @property
    def teachers(self) -> dict[str, str]:
        """The models that fill in columns of its batches: their sources, by the column's name."""
        return {}

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """With other sources of these models, by the column's name."""
        return self

    @property
    def pass_tokens(self) -> int:
        """Tokens of a micro-batch, of which only a longer sample has more."""
        return self.micro_batch_tokens or self.rows * self.seq_len

    @property
    def rows(self) -> int:
        """Rows of `seq_len` tokens in a micro-batch: `micro_batch_size`, if the plan has set it."""
        return self.micro_batch_size or 1

    @model_validator(mode="after")
    def _one_size_of_micro_batches(self) -> "TrainerBase":
        if self.micro_batch_tokens is not None and self.rows > 1:
            raise ValueError(
                f"micro_batch_tokens = {self.micro_batch_tokens} and micro_batch_size = "
                f"{self.micro_batch_size} both give the size of a micro-batch; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> "TrainerBase":
        if self.workers is not None and (problem := self.problem_of_ranks(self.workers)):
            raise ValueError(problem)
        optimizers = [self.optimizer, *(other.optimizer for other in self.auxiliary_models.values())]
        others = {one.type for one in optimizers}
        if problem := self.parallel.problem_beside(self.lora, others, compiled=self.compile):
            raise ValueError(f"{problem}; leave one out")
        return self

    @model_validator(mode="after")
    def _goes_with_the_backend(self) -> "TrainerBase":
        if self.backend == "megatron" and (other := self._not_with_megatron()):
            raise ValueError(f"{other} with backend = 'megatron'; leave one out")
        if self.backend == "fsdp2" and self.parallel.pipeline > 1:
            raise ValueError(
                f"parallel.pipeline = {self.parallel.pipeline} goes with backend = 'megatron' alone: FSDP2 "
                "shards each layer over all ranks, and has no stages; leave it out"
            )
        return self

    def _not_with_megatron(self) -> str | None:
        """A setting that does not go with megatron-core, and why; None if all do."""
        if self.optimizer.type != "adamw":
            return f"optimizer.type = {self.optimizer.type!r} does not go: its optimiser shards AdamW's state"
        others = {
            "parallel.context": self.parallel.context > 1,
            "replicas": self.replicas > 1,
            "lora": bool(self.lora),
            "freeze": bool(self.freeze),
            "compile": self.compile,
            "keep_gathered": self.keep_gathered is not None,
            "state_on": self.state_on != "device",
        }
        return next((f"{name} was not tried" for name, is_set in others.items() if is_set), None)

    @model_validator(mode="after")
    def _spikes_of_a_loss(self) -> "TrainerBase":
        if self.spike.loss is not None and not self.loss_is_positive:
            raise ValueError(
                f"spike.loss = {self.spike.loss} is for a loss that is above 0, and that of a policy is "
                "around it; spike.grad_norm is what can be used"
            )
        ckpt = self.ckpt
        if self.spike.on_spike == "rewind" and not (ckpt and ckpt.interval and ckpt.training_state):
            raise ValueError(
                "spike.on_spike = 'rewind' goes back to a step that the run has saved: give ckpt.interval, "
                "such as 50, and leave ckpt.training_state on; skip needs no checkpoints"
            )
        return self

    def problem_of_ranks(self, ranks: int) -> str | None:
        """Why `ranks` can't be divided into replicas, or share what they are to share; None if they can."""
        return self.parallel.problem_of_ranks(ranks, self.replicas)

    @model_validator(mode="after")
    def _freeze_fits(self) -> "TrainerBase":
        if self.lora and self.freeze:
            raise ValueError(
                f"freeze = {self.freeze} beside lora: an adapter's base is frozen already; lora.targets and "
                "lora.modules_to_save say what is trained"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainerBase":
        by_epochs = self.counted_records is not None
        if by_epochs and self.max_steps != type(self).model_fields["max_steps"].default:
            raise ValueError("max_steps beside data.epochs: both are the length of the run; give one of them")
        if not by_epochs and (problem := self.scheduler.problem(self.max_steps, "scheduler")):
            raise ValueError(problem)
        return self


class SFTConfig(TrainerBase):
    """Supervised fine-tuning (SFT) with FSDP2 on Ray workers."""

    task = "sft"
    loss_is_positive = True
    output_dir: AbsolutePath = Field(default="outputs/sft", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    data: SFTDataConfig = SFTDataConfig()
    validation: list[ValidationConfig] = []
    """Held-out records whose loss is measured, as [[validation]] tables; see docs/how-to/validation.md."""
    loss: SFTLossConfig = LikelihoodConfig()
    slurm: SlurmConfig | None = None

    @property
    def counted_records(self) -> SFTDataConfig | None:
        return self.data if self.data.epochs is not None else None

    @property
    def held_out_data(self) -> Mapping[str, SFTDataConfig]:
        how = {"shuffle": False, "batch_size": 1, "epochs": None}
        found: dict[str, SFTDataConfig] = {}
        for one in self.validation:
            if one.data is None:
                found[one.name] = HeldOutPart.model_validate(self.data.model_dump() | how)
            else:
                where = {"name": one.data.name, "split": one.data.split, "learn": self.data.learn}
                found[one.name] = SFTDataConfig.model_validate(
                    {**where, **how, "too_long": self.data.too_long}
                )
        return found

    @property
    def validated_at(self) -> Mapping[str, int]:
        return {one.name: one.interval for one in self.validation}

    @property
    def patiences(self) -> Mapping[str, int]:
        return {one.name: one.patience for one in self.validation if one.patience is not None}

    @field_validator("validation")
    @classmethod
    def _names_of_their_own(cls, value: list[ValidationConfig]) -> list[ValidationConfig]:
        refuse_twins("validations", "name", [one.name for one in value])
        return value

    @model_validator(mode="after")
    def _held_out_for_something(self) -> "SFTConfig":
        without = [one.name for one in self.validation if one.data is None]
        if without and not self.data.held_out:
            raise ValueError(f"validation {without[0]!r} needs data, or data.held_out, such as 0.05")
        if self.data.held_out and not without:
            raise ValueError(
                f"data.held_out = {self.data.held_out} is for a [[validation]] table without data, and there "
                "is none"
            )
        return self

    @model_validator(mode="after")
    def _ends_with_a_checkpoint(self) -> "SFTConfig":
        for name, patience in self.patiences.items():
            wrong = None
            if self.ckpt is None or not self.ckpt.training_state:
                wrong = "needs --ckpt with training_state, which says later that the run has ended"
            elif self.ckpt.remote or self.ckpt.export:
                wrong = "can't be together with ckpt.remote and ckpt.export, which wait for step max_steps"
            if wrong:
                raise ValueError(f"patience = {patience} of validation {name!r} {wrong}")
        return self

    @property
    def own_loss(self) -> LossConfig | None:
        return self.loss if self.loss.is_own else None
