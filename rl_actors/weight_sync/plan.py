"""Who sends which rectangle to whom, made once from what both sides hold. Pure.

Every trainer rank lists the pieces its shards hold, every engine worker those of its parameters. A transfer is the
intersection of two boxes; it goes from shard to shard, and no rank ever gathers a tensor. A parameter that several
ranks hold (data-parallel replicas) comes to each worker from a rank on its node, if there is one. The ranks of a node
share the work, so that all merge alike much; links within a node are faster than merging the same again.

Transfers are packed into messages, and a sender's messages into rounds of about one bucket. Invariants, checked here:
no element of a receiver is written twice, every element of a tensor that the trainer adapts is written once, and the
order (round, sender) is the same for all, so a sender may wait for round k-2 before it starts round k: no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_actors.errors import SyncError
from rl_actors.weight_sync.shards import Box, Piece, Slices, intersect, locate, volume

ALIGNMENT = 16
"""Messages start and end at multiples of this many bytes, so that they can be read as integers for checksums."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a local parameter, one entry of a message."""

    param: str
    local: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.local)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The same bytes for one or more receivers (numbers from 0), from the parameters of one round."""

    receivers: tuple[int, ...]
    tags: tuple[int, ...]
    parts: tuple[Part, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Round:
    """Parameters to merge, in order, and the messages made of them."""

    params: tuple[str, ...]
    messages: tuple[Outgoing, ...]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message to expect; `parts` say where its elements go, in order."""

    sender: int
    tag: int
    parts: tuple[Part, ...]
    numel: int


@dataclass(frozen=True)
class SyncPlan:
    """The whole of a sync. `sends` has one entry for each trainer rank, `receives` one for each engine worker."""

    sends: tuple[tuple[Round, ...], ...]
    receives: tuple[tuple[Incoming, ...], ...]
    tensors: int

    @property
    def elements(self) -> int:
        """Elements that arrive, over all receivers."""
        return sum(message.numel for messages in self.receives for message in messages)


@dataclass(frozen=True, slots=True)
class _Transfer:
    sender: int
    receiver: int
    source: Part
    target: Part
    numel: int


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A distinct parameter of the trainer: for each rank that holds it, its piece of each box."""

    copies: dict[int, dict[Box, Piece]]

    @property
    def boxes(self) -> list[Box]:
        return list(next(iter(self.copies.values())))

    @property
    def numel(self) -> int:
        return sum(volume(box.slices) for box in self.boxes)

    def name(self, rank: int) -> str:
        """What a rank calls it."""
        return next(iter(self.copies[rank].values())).param


def make_plan(
    trainer: Sequence[Sequence[Piece]],
    workers: Sequence[Sequence[Piece]],
    engines: Sequence[int],
    bucket_numel: int,
    places: tuple[Sequence[str], Sequence[str]] | None = None,
) -> SyncPlan:
    """Plan the transfers of every tensor that the trainer lists.

    Args:
        trainer: pieces of each rank. Tensors that are not listed here are not planned.
        workers: pieces of each engine worker.
        engines: the engine that each worker belongs to.
        bucket_numel: elements of one round; a parameter that is larger gets a round of its own.
        places: "node/GPU" of each rank and of each worker; None if all are on one node.

    Raises:
        SyncError: a tensor is missing, covered twice or not wholly, on either side.
    """
    parameters = _parameters(trainer)
    sources = _by_name(parameters)
    _check_engines(sources, workers, engines)
    senders = _senders(parameters, workers, *(places or ([""] * len(trainer), [""] * len(workers))))
    transfers: list[_Transfer] = []
    for receiver, pieces in enumerate(workers):
        for piece in pieces:
            if piece.box.name in sources:
                near = [
                    (rank, parameters[index].copies[rank][box])
                    for index, box in sources[piece.box.name]
                    if (rank := senders[index].get(receiver)) is not None
                ]
                transfers += _cover(piece, receiver, near)
    sizes: list[dict[str, int]] = [{} for _ in trainer]
    for parameter, of_workers in zip(parameters, senders, strict=True):
        for rank in set(of_workers.values()):
            sizes[rank][parameter.name(rank)] = parameter.numel
    return _pack(transfers, sizes, len(workers), bucket_numel, len(sources))


def _parameters(trainer: Sequence[Sequence[Piece]]) -> list[_Parameter]:
    found: dict[frozenset[Box], _Parameter] = {}
    for rank, pieces in enumerate(trainer):
        by_name: dict[str, dict[Box, Piece]] = defaultdict(dict)
        for piece in pieces:
            by_name[piece.param][piece.box] = piece
        for own in by_name.values():
            # A rank that holds one twice (tied embeddings in a pipeline of one) sends the first.
            found.setdefault(frozenset(own), _Parameter({})).copies.setdefault(rank, own)
    return list(found.values())


def _senders(
    parameters: list[_Parameter],
    workers: Sequence[Sequence[Piece]],
    rank_places: Sequence[str],
    worker_places: Sequence[str],
) -> list[dict[int, int]]:
    """For each parameter the rank that sends it to each worker that needs of it: a near one with least to merge."""
    wanted: list[dict[str, list[Slices]]] = [defaultdict(list) for _ in workers]
    for worker, pieces in enumerate(workers):
        for piece in pieces:
            wanted[worker][piece.box.name].append(piece.box.slices)
    rank_nodes, worker_nodes = ([one.partition("/")[0] for one in places] for places in (rank_places, worker_places))
    load = [0] * len(rank_places)
    senders = []
    for parameter in parameters:
        of_node: dict[str, int] = {}
        of_workers: dict[int, int] = {}
        for worker, node in enumerate(worker_nodes):
            if not any(
                intersect(box.slices, other) for box in parameter.boxes for other in wanted[worker].get(box.name, ())
            ):
                continue
            if node not in of_node:
                near = [rank for rank in parameter.copies if rank_nodes[rank] == node]
                # Nodes without a copy share one sender, which merges once for all of them.
                far = [rank for rank in parameter.copies if rank in of_node.values()] or list(parameter.copies)
                rank = min(near or far, key=lambda rank: (load[rank], rank))
                if rank not in of_node.values():
                    load[rank] += parameter.numel
                of_node[node] = rank
            of_workers[worker] = of_node[node]
        senders.append(of_workers)
    return senders


def _by_name(parameters: list[_Parameter]) -> dict[str, list[tuple[int, Box]]]:
    """The boxes of each tensor, with the number of their parameter."""
    sources: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        for box in parameter.boxes:
            for other_index, other in sources[box.name]:
                if intersect(box.slices, other.slices):
                    ranks = [next(iter(one.copies)) for one in (parameters[other_index], parameter)]
                    raise SyncError(
                        f"{box.name}: trainer ranks {ranks[0]} and {ranks[1]} hold overlapping parts of it, "
                        f"{other.slices} and {box.slices}"
                    )
            sources[box.name].append((index, box))
    return dict(sources)


def _check_engines(
    sources: dict[str, list[tuple[int, Box]]], workers: Sequence[Sequence[Piece]], engines: Sequence[int]
) -> None:
    """Every engine holds, over its workers, at least the elements that the trainer has."""
    wanted = {name: sum(volume(box.slices) for _, box in boxes) for name, boxes in sources.items()}
    for engine in sorted(set(engines)):
        held: dict[str, int] = defaultdict(int)
        mine = [pieces for pieces, owner in zip(workers, engines, strict=True) if owner == engine]
        for box in {piece.box for pieces in mine for piece in pieces}:
            held[box.name] += volume(box.slices)
        for name, elements in wanted.items():
            if held[name] != elements:
                raise SyncError(
                    f"{name}: the trainer has {elements} elements of it and engine {engine} {held[name]}; "
                    "they are not shards of the same model"
                )


def _cover(piece: Piece, receiver: int, sources: Iterable[tuple[int, Piece]]) -> list[_Transfer]:
    """The transfers that fill a receiver's piece. Sources are disjoint, so equal volumes mean covered exactly once."""
    transfers = []
    for sender, source in sources:
        common = intersect(piece.box.slices, source.box.slices)
        if common:
            transfers.append(
                _Transfer(
                    sender,
                    receiver,
                    Part(source.param, locate(source, common)),
                    Part(piece.param, locate(piece, common)),
                    volume(common),
                )
            )
    covered = sum(transfer.numel for transfer in transfers)
    if covered != volume(piece.box.slices):
        raise SyncError(
            f"{piece.box.name}: worker {receiver} needs {piece.box.slices} of it and trainer ranks hold only "
            f"{covered} of these {volume(piece.box.slices)} elements"
        )
    return transfers


def _pack(
    transfers: list[_Transfer], sizes: list[dict[str, int]], receivers: int, bucket_numel: int, tensors: int
) -> SyncPlan:
    """`sizes` has for each sender the elements of the parameters that it sends, in their order."""
    by_source: dict[tuple[int, str], list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_source[transfer.sender, transfer.source.param].append(transfer)
    sends: list[list[Round]] = [[] for _ in sizes]
    incoming: list[list[tuple[int, Incoming]]] = [[] for _ in range(receivers)]
    for sender, own in enumerate(sizes):
        tags = [0] * receivers
        for index, params in enumerate(_rounds(own, bucket_numel)):
            inside = [transfer for param in params for transfer in by_source[sender, param]]
            messages, arrivals = _messages(inside, sender, tags)
            sends[sender].append(Round(params, messages))
            for receiver, arrival in arrivals:
                incoming[receiver].append((index, arrival))
    receives = tuple(
        tuple(arrival for _, arrival in sorted(entries, key=lambda entry: (entry[0], entry[1].sender, entry[1].tag)))
        for entries in incoming
    )
    return SyncPlan(tuple(tuple(rounds) for rounds in sends), receives, tensors)


def _rounds(sizes: dict[str, int], bucket_numel: int) -> list[tuple[str, ...]]:
    """Consecutive parameters, about one bucket of them at a time."""
    rounds: list[tuple[str, ...]] = []
    current: list[str] = []
    filled = 0
    for param, numel in sizes.items():
        if current and filled + numel > bucket_numel:
            rounds.append(tuple(current))
            current, filled = [], 0
        current.append(param)
        filled += numel
    if current:
        rounds.append(tuple(current))
    return rounds


def _messages(
    transfers: list[_Transfer], sender: int, tags: list[int]
) -> tuple[tuple[Outgoing, ...], list[tuple[int, Incoming]]]:
    """One message for each receiver; receivers that want the same rectangles share its bytes."""
    by_receiver: dict[int, list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_receiver[transfer.receiver].append(transfer)
    alike: dict[tuple[Part, ...], list[tuple[int, int]]] = defaultdict(list)
    arrivals = []
    for receiver in sorted(by_receiver):
        sources, targets = _coalesce(by_receiver[receiver])
        numel = sum(volume(part.local) for part in sources)
        alike[sources].append((receiver, tags[receiver]))
        arrivals.append((receiver, Incoming(sender, tags[receiver], targets, numel)))
        tags[receiver] += 1
    messages = tuple(
        Outgoing(
            receivers=tuple(receiver for receiver, _ in addressed),
            tags=tuple(tag for _, tag in addressed),
            parts=parts,
            numel=sum(volume(part.local) for part in parts),
        )
        for parts, addressed in alike.items()
    )
    return messages, arrivals


def _coalesce(transfers: list[_Transfer]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Join rectangles that follow each other on both sides (gate and up, experts): fewer, larger copies."""
    sources: list[Part] = []
    targets: list[Part] = []
    for transfer in transfers:
        if sources:
            source = _extended(sources[-1], transfer.source)
            target = _extended(targets[-1], transfer.target)
            if source and target:
                sources[-1], targets[-1] = source, target
                continue
        sources.append(transfer.source)
        targets.append(transfer.target)
    return tuple(sources), tuple(targets)


def _extended(part: Part, following: Part) -> Part | None:
    """`part` with `following` behind it, if it is its continuation: the elements of both, in their order."""
    if part.param != following.param or len(part.local) < 2:
        return None
    axes = [axis for axis, (one, other) in enumerate(zip(part.local, following.local, strict=True)) if one != other]
    if (
        len(axes) != 1
        or axes[0] == len(part.local) - 1
        or any(start + 1 != stop for start, stop in part.local[: axes[0]])
    ):
        return None
    (axis,) = axes
    (first, middle), (next_first, last) = part.local[axis], following.local[axis]
    if middle != next_first:
        return None
    return Part(part.param, (*part.local[:axis], (first, last), *part.local[axis + 1 :]))
