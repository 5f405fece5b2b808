"""The loss of SFT: negative log-likelihood."""

from cairn.trainer.losses.loss import Loss, LossInputs, LossSums


class Likelihood(Loss):
    """-log p of each learned token."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        return LossSums(-(inputs.logprobs * inputs.mask).sum())
