# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Deltas: what makes a policy of the one before it, to the bit.

After a step most values of a policy are the same as before in the data type that servers get, or differ in
their last bits. A value's change is the difference of the old and the new one's bits, read as integers; its
sign is moved into the lowest bit (zigzag), so that small changes of either sign are small numbers. The
changes of a tensor are cut into blocks, each of which is packed like a block of a checkpoint
(`checkpoint/tensors/compression.py`): the bytes of its values regrouped, and compressed by Zstandard. A block
in which nothing has changed is left out.

A policy is known by its digest, which is one of its tensors' checksums (`checksums.py`). Whoever has applied
a delta compares the checksums of the result with those that the trainer has computed from its own values.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.compression import MAX_BLOCK_BYTES, pack, unpack
from cairn.checkpoint.tensors.host_staging import Outlet
from cairn.checkpoint.tensors.placement import Share
from cairn.checkpoint.tensors.reader import as_memory
from cairn.checkpoint.tensors.sharded_files import pieces_of
from cairn.policy.checksums import RunningSums

HEADER = struct.Struct("<QIIB")
"""Of a block: the number of its first value in the tensor, its values, the bytes that follow, and the width
of a value in their regrouping (0: they are stored as they are)."""
BLOCK_BYTES = 1 << 20
"""Of values in a block: few enough for the processor's cache."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of a value in bytes."""


def digest_of(sums: Mapping[str, int]) -> str:
    """What tells a policy from every other one: the SHA-256 of its tensors' names and checksums, in hex."""
    return hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()


def encode(old: torch.Tensor, new: torch.Tensor, first: int) -> bytes:
    """The blocks that make `new` of `old`; both are flat, on the host, of one data type and length.

    Args:
        first: the number of their first value in the tensor.
    """
    integers = INTEGERS[new.element_size()]
    found: list[bytes] = []
    count = BLOCK_BYTES // new.element_size()
    for before, after in zip(old.view(integers).split(count), new.view(integers).split(count), strict=True):
        if not torch.equal(before, after):
            change = after - before  # modulo 2 ^ bits
            change = (change << 1) ^ (change >> (8 * change.element_size() - 1))
            packed, width = pack(as_memory(change), new.element_size())
            found += [HEADER.pack(first, len(after), len(packed), width), packed]
        first += len(after)
    return b"".join(found)


def apply(blocks: memoryview, tensor: torch.Tensor, name: str) -> None:
    """Make the new values of a flat tensor of the old ones, in place, by the blocks that `encode` has made.

    Raises:
        Damaged: these are no blocks of such a tensor; it may hold some new values.
    """
    values = tensor.view(INTEGERS[tensor.element_size()])
    where = f"the delta of {name}"
    while blocks:
        if len(blocks) < HEADER.size:
            raise Damaged(f"{where}: it ends within the header of a block")
        first, count, stored, width = HEADER.unpack_from(blocks)
        nbytes = count * values.element_size()
        packed, blocks = blocks[HEADER.size : HEADER.size + stored], blocks[HEADER.size + stored :]
        whole = stored if width == 0 else nbytes
        if len(packed) != stored or width not in (0, values.element_size()) or whole != nbytes:
            raise Damaged(f"{where}: not the header of a block: {first, count, stored, width}")
        if nbytes > MAX_BLOCK_BYTES or not count or first + count > len(values):
            raise Damaged(f"{where}: no block of a tensor of {len(values)} values: {first, count}")
        change = torch.frombuffer(bytearray(unpack(packed, nbytes, width, where)), dtype=values.dtype)
        signs = (change & 1).neg_()
        change >>= 1
        change &= torch.iinfo(values.dtype).max  # the highest bit is the sign again, and must be 0
        change ^= signs
        values[first : first + count] += change


@dataclass(frozen=True)
class RankDelta:
    """What one rank's share of a policy has changed by.

    blocks: by tensor, of those that have any. sums: the rank's contributions to the checksums of the new
    policy's tensors.
    """

    blocks: Mapping[str, bytes]
    sums: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(map(len, self.blocks.values()))


@dataclass
class LastPublished:
    """One rank's share of the policy that was published last, as servers have it, in host memory.

    That is as many bytes as the rank sends of a whole policy. digest: of the policy; empty before it is known
    whole.
    """

    digest: str = ""
    _pieces: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict[tuple[str, int], torch.Tensor])

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, and of a whole policy."""
        return sum(piece.nbytes for piece in self._pieces.values())

    def keep(self, name: str, values: torch.Tensor, first: int) -> None:
        """Replace values of a tensor, flat ones on any device, the first of which has this number."""
        if (place := self._pieces.get((name, first))) is None:
            place = self._pieces[name, first] = torch.empty(len(values), dtype=values.dtype)
        place.copy_(values)

    def advance(
        self,
        shares: Mapping[str, tuple[Share, torch.dtype]],
        outlet: Outlet,
        check: Callable[[], object],
    ) -> RankDelta:
        """Replace all values; returns what has changed, which is nothing where there were none.

        Args:
            shares: the same ones each time, and what they are published as, by tensor.
            check: called before each piece; what it raises ends it.
        """
        blocks: dict[str, list[bytes]] = {}
        sums = RunningSums()
        with torch.no_grad(), outlet.running():
            for name, first, piece in _pieces(shares, outlet.piece_bytes):
                check()
                sums.add(name, piece, first * piece.element_size())
                values = outlet.bring(piece)
                if (last := self._pieces.get((name, first))) is not None:
                    blocks.setdefault(name, []).append(encode(last, values, first))
                self.keep(name, values, first)
            joined = {name: b"".join(parts) for name, parts in blocks.items()}
            return RankDelta({name: each for name, each in joined.items() if each}, sums.numbers())


def _pieces(
    shares: Mapping[str, tuple[Share, torch.dtype]], piece_bytes: int
) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name, (share, dtype) in shares.items():
        for first, piece in pieces_of(share, dtype, piece_bytes):
            yield name, first, piece
