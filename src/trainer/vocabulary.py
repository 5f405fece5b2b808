"""Models beside the policy that have fewer rows of embeddings: tokens that they can't read are refused."""

from transformers import PreTrainedConfig

from cairn.run.errors import UsageError
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import RankBatch


class VocabularyRows:
    """The rows of a model's embeddings, beside the policy's.

    Models of one family often differ in the rows that pad their embeddings. These stand for no token, but a
    policy may sample one of its own, and a model without that row would fail in the middle of a step.
    """

    def __init__(self, model: PreTrainedConfig, policy: PreTrainedConfig, group: RankGroup, *, about: str):
        """Compare the configurations of two models.

        Args:
            about: the setting and the model's name, for messages.
        """
        self.count, of_policy = (one.get_text_config().vocab_size for one in (model, policy))
        self._has_fewer = self.count < of_policy
        self._group, self._about = group, about

    def check(self, batch: RankBatch) -> None:
        """See that the model has a row for every token of the batch; all ranks call it.

        Raises:
            UsageError: on all ranks, if one of them has a token without a row.
        """
        if not self._has_fewer:
            return
        highest = max((int(micro.input_ids.max()) for micro in batch.micros), default=0)
        token = max(self._group.gather_objects(highest))
        if token >= self.count:
            raise UsageError(
                f"{self._about}: its embeddings have {self.count} rows, and the policy has sampled token "
                f"{token}, which stands for no text (a padding row of its own embeddings); take a model with "
                "as many rows as the policy, or pad this one's (resize_token_embeddings)"
            )
