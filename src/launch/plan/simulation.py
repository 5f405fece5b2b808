"""Simulates an RL run on GPUs, of which some train and the others serve: which division is the fastest?

It is a simulation of events: prompts are issued, answered, trained on and followed by a policy as the
orchestrator does it (`orchestrator/batching.py`). How fast a GPU is follows from a few constants, those of an
H100; what counts here is how long serving takes compared with training, which differs little between kinds of
GPUs. Deterministic: lengths of answers are drawn from a fixed seed.

Sources of the constants: PEAK and BANDWIDTH are NVIDIA's (H100 SXM, bfloat16, dense). MFU: 25 to 30 % were
measured with 1.7B parameters (docs/results/gpu.md), 24 to 28 % are predicted for 8B. Everything else is
assumed, and was measured on no GPU: READ and OVERHEAD are what vLLM's published times of decoding 8B models
amount to; LOAD is predicted from the bandwidth of copies out of pageable memory that was measured
(docs/results/gpu.md).
"""

import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

PEAK = 989e12
"""Operations that a GPU could do in a second."""
BANDWIDTH = 3.35e12
"""Bytes of its memory that it could read in a second."""
MFU = 0.25
"""Share of PEAK that training reaches."""
EXPERTS_MFU = 0.04
"""The same of a mixture of experts, whose layers are gathered with all experts: predicted below 0.05."""
PREFILL = 0.4
"""Share of PEAK that reading a prompt reaches."""
READ = 0.75
"""Share of BANDWIDTH that decoding reaches."""
OVERHEAD = 3e-3
"""Seconds that each token takes for scheduling, sampling and logprobs, whatever the model."""
REDUCE = 20e-6
"""Seconds of an exchange among the GPUs of one server, of which each layer has two for each token."""
LOAD = 5e9
"""Bytes a second at which servers take a policy, and the trainer writes one."""
SEQUENCES = 256
"""Answers that a server has in progress at most."""
STEPS, SKIPPED = 5, 2
"""Steps that are simulated, and how many of the first ones are not counted, which begin with idle GPUs."""
EQUAL = 0.97
"""Share of the highest speed that is as good: the constants are no better."""
SLICE = 512
"""Tokens of each answer for which the speed of a server is taken to be constant, at most."""
SPREAD = 0.6
"""Of the logarithm of an answer's length."""


@dataclass(frozen=True)
class ModelShape:
    """Of a model. key_value_bytes: of one token's keys and values, in all layers.

    experts: those of `parameters` that belong to experts. chosen: the share of the experts that a token uses.
    """

    parameters: int
    layers: int
    hidden: int
    key_value_bytes: int
    experts: int = 0
    chosen: float = 1.0

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.parameters - self.experts * (1 - self.chosen)

    def read(self, tokens: int) -> float:
        """Parameters that so many tokens together are multiplied with, if each chooses at random."""
        return self.parameters - self.experts * (1 - self.chosen) ** tokens

    @property
    def mfu(self) -> float:
        """Share of PEAK that training reaches."""
        return EXPERTS_MFU if self.experts else MFU


@dataclass(frozen=True)
class SimulatedWork:
    """A step of the run. prompt, mean, longest: tokens of a prompt and of an answer.

    behind: `max_off_policy_steps`. again: whether activations are computed twice (activation_checkpointing).
    """

    prompts: int
    samples: int
    prompt: int
    mean: int
    longest: int
    behind: int
    again: bool = False

    def length(self, place: int) -> int:
        """Tokens of the answer at a place in the run: lognormal, as answers of reasoning models about are."""
        return max(1, min(self.longest, round(self.mean * math.exp(_drawn(place) - SPREAD**2 / 2))))


@functools.cache
def _drawn(place: int) -> float:
    return random.Random(f"length {place}").gauss(0, SPREAD)


@dataclass(frozen=True)
class GpuSplit:
    """So many ranks, and so many servers with `size` GPUs each. cache: tokens that fit into a server's."""

    ranks: int
    servers: int
    size: int
    cache: int

    @property
    def imbalance(self) -> int:
        """How many GPUs more one half has than the other."""
        return abs(self.ranks - self.servers * self.size)


@dataclass(frozen=True)
class SplitOutcome:
    """What a split comes to. tokens: of answers, a second. step: seconds of one.

    training: share of the time in which the ranks train. serving: share in which servers generate, on
    average. in_progress: answers in progress in a server, on average over that time.
    """

    split: GpuSplit
    tokens: float
    step: float
    training: float
    serving: float
    in_progress: float

    @property
    def in_words(self) -> str:
        """One line about it."""
        return (
            f"about {self.tokens:,.0f} tokens/s of answers, ranks busy {self.training:.0%} of the time and "
            f"servers {self.serving:.0%}, with {self.in_progress:.0f} answers in progress each"
        )


@dataclass
class _Server:
    """One server. Its answers all advance at the same speed, so they end in the order of `ends`."""

    model: ModelShape
    split: GpuSplit
    most: int
    done: float = 0.0
    """Tokens that an answer has got which is in progress from the beginning."""
    context: float = 0.0
    """Tokens of all answers in progress, with their prompts."""
    ends: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """By `done`: when an answer ends, its place, its tokens."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    paused: float = 0.0
    """Seconds until it goes on, after it has taken a policy."""
    reading: float = 0.0
    """Seconds until it has read new prompts, and goes on."""
    busy: float = 0.0
    answered: float = 0.0
    """Seconds of all answers in progress together."""

    @property
    def load(self) -> int:
        return len(self.ends) + len(self.waiting)

    def admit(self, prompt: int) -> None:
        """Begin what waits, as far as there is room."""
        while self.waiting and len(self.ends) < self.most:
            place, tokens = self.waiting.popleft()
            heapq.heappush(self.ends, (self.done + tokens, place, tokens))
            self.context += prompt

    @property
    def token_seconds(self) -> float:
        """Seconds of a token of each answer: weights, keys and values are read, and something is computed."""
        model, answers = self.model, len(self.ends)
        read = (2 * model.read(answers) + self.context * model.key_value_bytes) / (BANDWIDTH * READ)
        computed = 2 * model.active * answers / (PEAK * PREFILL)
        exchanged = 2 * model.layers * REDUCE if self.split.size > 1 else 0.0
        return OVERHEAD + max(read, computed) / self.split.size + exchanged

    def until_event(self) -> float:
        """Seconds until something changes: it goes on, an answer ends, or the speed is to be looked at."""
        if self.paused > 0 or self.reading > 0:
            return self.paused or self.reading
        return min(self.ends[0][0] - self.done, SLICE) * self.token_seconds if self.ends else math.inf

    def advance(self, seconds: float) -> None:
        if self.paused > 0:
            self.paused = max(0.0, self.paused - seconds)
        elif self.reading > 0:
            self.reading = max(0.0, self.reading - seconds)
            self.busy += seconds
            self.answered += seconds * len(self.ends)
        elif self.ends:
            tokens = seconds / self.token_seconds
            self.context += tokens * len(self.ends)
            self.done += tokens
            self.busy += seconds
            self.answered += seconds * len(self.ends)

    def ended(self, prompt: int) -> Iterator[int]:
        """The places of the answers that have ended."""
        while self.ends and self.ends[0][0] <= self.done + 1e-6:
            _, place, tokens = heapq.heappop(self.ends)
            self.context -= prompt + tokens
            yield place


def simulate(model: ModelShape, work: SimulatedWork, split: GpuSplit) -> SplitOutcome:
    """Let a run go through STEPS steps with this division of its GPUs."""
    return _Run(model, work, split).outcome()


def fastest(model: ModelShape, work: SimulatedWork, splits: Iterable[GpuSplit]) -> list[SplitOutcome]:
    """What each split comes to, the best first: the fastest, and of those that are as good as equally fast
    the one nearest to half of the GPUs for each."""
    found = [simulate(model, work, split) for split in splits]
    most = max(one.tokens for one in found)

    def worse(one: SplitOutcome) -> tuple[float, int]:
        return (0.0 if one.tokens >= EQUAL * most else most - one.tokens), one.split.imbalance

    return sorted(found, key=worse)


def splits_of(gpus: int, size: int, cache: int, *, step: int = 1) -> Sequence[GpuSplit]:
    """The divisions of so many GPUs into ranks and servers of `size` GPUs, and at least one of each.

    Args:
        cache: tokens whose keys and values fit into a server.
        step: number of GPUs that are given to servers together, such as those of a node.
    """
    serving = range(math.lcm(step, size), gpus, math.lcm(step, size))
    return [GpuSplit(gpus - number, number // size, size, cache) for number in serving]


class _Run:
    """A run in the middle of things."""

    def __init__(self, model: ModelShape, work: SimulatedWork, split: GpuSplit):
        self.model, self.work, self.split = model, work, split
        mean = work.prompt + work.mean * math.exp(SPREAD**2) / 2  # over the time that answers take
        most = max(1, min(SEQUENCES, int(split.cache / mean)))
        self.servers = [_Server(model, split, most) for _ in range(split.servers)]
        self.issued = self.shipped = self.trained = self.served = 0  # groups, and steps
        self.left: dict[int, int] = {}
        self.ready: list[int] = []
        self.to_train: deque[list[int]] = deque()
        self.training = self.publishing = math.inf
        self.trained_for = 0.0

    def outcome(self) -> SplitOutcome:
        """Let the steps pass, and see what they come to."""
        clock, since, marks, busy = 0.0, 0.0, (0.0, 0.0), 0.0
        tokens, marked = 0, 0
        while self.trained < STEPS:
            self.issue()
            seconds = min(self.training, self.publishing, *(one.until_event() for one in self.servers))
            assert seconds < math.inf, "something is always under way"
            clock += seconds
            self.advance(seconds)
            if self.training <= 0:
                self.training = math.inf
                tokens += sum(self.tokens_of(group) for group in self.to_train.popleft())
                self.trained += 1
                self.publishing = 2 * self.model.parameters / LOAD
                if self.trained == SKIPPED:
                    since, busy, marked = clock, self.trained_for, tokens
                    marks = self.servings()
            if self.publishing <= 0:
                self.publishing, self.served = math.inf, self.trained
                for server in self.servers:
                    server.paused = 2 * self.model.parameters / LOAD
            if self.to_train and self.training == math.inf:
                self.training = self.seconds_of(self.to_train[0])
        span = clock - since
        serving, answered = (now - before for now, before in zip(self.servings(), marks, strict=True))
        return SplitOutcome(
            self.split,
            tokens=(tokens - marked) / span,
            step=span / (STEPS - SKIPPED),
            training=(self.trained_for - busy) / span,
            serving=serving / span / len(self.servers),
            in_progress=answered / serving if serving else 0.0,
        )

    def servings(self) -> tuple[float, float]:
        """Seconds of all servers in which they generate, and of all answers in progress."""
        return sum(one.busy for one in self.servers), sum(one.answered for one in self.servers)

    def issue(self) -> None:
        """Issue as many prompts as can still be used before their answers become too old."""
        work = self.work
        horizon = min(self.served + 1 + work.behind, STEPS)
        while len(self.left) + len(self.ready) < (horizon - self.shipped) * work.prompts:
            if sum(self.left.values()) + work.samples > SEQUENCES * len(self.servers) and self.left:
                break
            server = min(self.servers, key=lambda one: one.load)
            for place in range(self.issued * work.samples, (self.issued + 1) * work.samples):
                server.waiting.append((place, work.length(place)))
            server.reading += 2 * self.model.active * work.prompt / (PEAK * PREFILL * self.split.size)
            self.left[self.issued] = work.samples
            self.issued += 1
        for server in self.servers:
            server.admit(work.prompt)

    def advance(self, seconds: float) -> None:
        """Let time pass, and take note of the answers that have ended."""
        if self.training < math.inf:
            self.trained_for += seconds
        self.training -= seconds
        self.publishing -= seconds
        for server in self.servers:
            server.advance(seconds)
            for place in server.ended(self.work.prompt):
                group = place // self.work.samples
                self.left[group] -= 1
                if not self.left[group]:
                    del self.left[group]
                    self.ready.append(group)
        if len(self.ready) >= self.work.prompts:
            self.ready.sort()
            self.to_train.append(self.ready[: self.work.prompts])
            del self.ready[: self.work.prompts]
            self.shipped += 1

    def tokens_of(self, group: int) -> int:
        return sum(map(self.work.length, self.places(group)))

    def places(self, group: int) -> range:
        return range(group * self.work.samples, (group + 1) * self.work.samples)

    def seconds_of(self, batch: Sequence[int]) -> float:
        """Seconds of a training step: 6 operations for each parameter and token, and those of attention."""
        model, work = self.model, self.work
        lengths = [work.prompt + work.length(place) for group in batch for place in self.places(group)]
        operations = sum(
            6 * model.active * length + 6 * model.layers * model.hidden * length**2 for length in lengths
        )
        return operations * (4 / 3 if work.again else 1) / (PEAK * model.mfu * self.split.ranks)
