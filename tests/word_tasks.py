"""A taskset for the library verifiers: words to be reversed. Imported where the library is."""

# pyright: reportMissingImports=false

import verifiers.v1 as vf


class Data(vf.TaskData):
    """A word, reversed."""

    answer: str


class Word(vf.Task[Data]):
    """Reverse a word."""

    @vf.reward(weight=2.0)
    async def first(self, trace) -> float:
        """Whether the first letter is right."""
        return float(trace.last_reply[:1] == self.data.answer[:1])

    @vf.reward()
    async def whole(self, trace) -> float:
        """Half a point for an answer that was not cut off."""
        return 0.0 if trace.is_truncated else 0.5

    @vf.metric
    async def tokens(self, trace) -> float:
        """Of the answer."""
        return float(trace.num_output_tokens)


class Words(vf.Taskset[Word, vf.TasksetConfig]):
    """Three of them."""

    def load(self):
        """The tasks."""
        for word in ("ab", "cd", "ef"):
            yield Word(Data(prompt=word, system_prompt="reverse", answer=word[::-1]))


__all__ = ["Words"]
