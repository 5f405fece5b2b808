"""What `--colocate` means for the settings of an RL run: trainer and server take turns on one GPU, or CPU."""

from cairn.config.rl import RLConfig
from cairn.run.errors import UsageError


def taking_turns(config: RLConfig) -> RLConfig:
    """The settings with which trainer and server take turns.

    Raises:
        UsageError: a setting contradicts that.
    """
    orchestrator, trainer = config.orchestrator, config.trainer
    behind = orchestrator.max_off_policy_steps
    if behind and "max_off_policy_steps" in orchestrator.model_fields_set:
        raise UsageError(
            f"--orchestrator.max-off-policy-steps {behind}: with --colocate, trainer and server take turns, "
            "so no answer can come from an earlier policy; set it to 0, or give each a GPU of its own "
            "(--no-colocate, or a server elsewhere with --orchestrator.inference-url)"
        )
    if trainer.weight_transport != "files":
        raise UsageError(
            f"--trainer.weight-transport {trainer.weight_transport}: with --colocate, a policy must outlive "
            "its trainer, who may have to wait for a server that needs it; set it to files"
        )
    return config.model_copy(
        update={
            "orchestrator": orchestrator.model_copy(update={"max_off_policy_steps": 0, "colocated": True}),
            "trainer": trainer.model_copy(update={"colocated": True}),
            "inference": config.inference.model_copy(update={"colocated": True}),
        }
    )
