"""What is minimised: one file a loss, chosen by the `type` that the configuration gives.

A loss of your own extends `Loss` and is named as module:Class; see "A loss" in docs/how-to/extending.md.
"""

from cairn.config.loss import LossConfig
from cairn.config.teachers import KLConfig
from cairn.run.extensions import BadExtension, load, make
from cairn.trainer.losses.bradley_terry import BradleyTerry
from cairn.trainer.losses.cispo import Cispo
from cairn.trainer.losses.dpo import DPO
from cairn.trainer.losses.dppo import Dppo
from cairn.trainer.losses.gpg import Gpg
from cairn.trainer.losses.gspo import Gspo
from cairn.trainer.losses.icepop import IcePop
from cairn.trainer.losses.ipo import IPO
from cairn.trainer.losses.kto import KTO
from cairn.trainer.losses.likelihood import Likelihood
from cairn.trainer.losses.loss import OLD_LOGPROBS, KLPenalty, Loss, LossInputs, LossSums
from cairn.trainer.losses.orpo import ORPO
from cairn.trainer.losses.ppo_clip import PPOClip
from cairn.trainer.losses.preferences import REFERENCE, SIDE
from cairn.trainer.losses.sapo import Sapo
from cairn.trainer.losses.simpo import SimPO

__all__ = [
    "LOSSES",
    "OLD_LOGPROBS",
    "REFERENCE",
    "SIDE",
    "Likelihood",
    "Loss",
    "LossInputs",
    "LossSums",
    "make_loss",
]

LOSSES: dict[str, type[Loss]] = {
    "likelihood": Likelihood,
    "ppo_clip": PPOClip,
    "cispo": Cispo,
    "icepop": IcePop,
    "gspo": Gspo,
    "dppo": Dppo,
    "sapo": Sapo,
    "gpg": Gpg,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "simpo": SimPO,
    "orpo": ORPO,
    "bradley_terry": BradleyTerry,
}
"""By type; `cairn.config.loss` says which are for SFT and which for RL, `cairn.config.preferences` which are
for preferences, and both what each is made with."""


def make_loss(config: LossConfig, kl: KLConfig | None = None) -> Loss:
    """The loss that a configuration asks for.

    Args:
        kl: the penalty on the divergence from a reference that is to be a term of it.

    Raises:
        BadExtension: a class of the user's can't be found, can't be made, is no loss, or takes no penalty.
    """
    cls = load(config.type, LOSSES, "loss.type", group="cairn.losses")
    loss = make(cls, config.arguments(), "loss.args")
    if not isinstance(loss, Loss):
        raise BadExtension(f"loss.type = {config.type!r}: it does not extend cairn.trainer.losses.Loss")
    if kl is not None:
        if not loss.takes_kl:
            raise BadExtension(
                f"loss.type = {config.type!r} with kl.place = 'loss': it adds no such penalty; extend "
                "PolicyLoss (cairn.trainer.losses.policy), or take kl.place = 'reward'"
            )
        assert kl.coef is not None, "the configuration has checked it"
        loss.kl = KLPenalty(kl.coef, kl.estimator, kl.unbiased)
    return loss
