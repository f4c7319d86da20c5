"""Reads whole prompts into a model's cache, and chooses how much of the cache a forward reads.

Long prompts are read in chunks, to bound memory and the size of the mask. Nothing is sampled here. Prompts of one batch
are padded to the longest, or packed where attention goes by the lengths of rows:

    padded    | prompt 0 .............. |      packed    | prompt 0 .............. | prompt 1 .. | prompt 2 ....... |
              | prompt 1 .. - - - - - - |
              | prompt 2 ....... - - -  |

A packed chunk holds as many tokens as a padded one of the same prompts, so it needs no more memory, and there are never
more of them. Where bits do not depend on the tokens read together, prompts of nearly one length share a chunk: it is
padded little, and its results stay in a processor's caches.

Tokens that a row of the cache holds are not read again (`Held`): a prompt copies them from there, then reads the rest.

    read first    | prompt 0 .......................... |       holds nothing
    read second   | copied from 0 ..... | prompt 1 .. |         and all others of which a part is held
    never read    | copied from 0 ..................... |       prompt 2 is equal to prompt 0, and so are its logits

A few tokens are read in a forward of one of few shapes, so that a graph replays it (`ShortForwards`). It repeats the
last token to its full size, and every token is a sequence of its own to attention: any prompts fit into the shape.

    8 tokens    | prompt 0 .. | prompt 1 ..... | its last token again |

Shapes: R rows being prefilled, S slots, T positions of a chunk, V vocabulary; M packed tokens, C pieces of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import PREFILL_CHUNK, masked_chunk, short_size
from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import NullRunner, Pieces, Runner
from llama_ssp.models.upload import to_device

_SHORT_SLOTS = 2**14
"""The most cache slots that the tokens of a short forward see together: each token reads its row for itself."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Buckets, the numbers of cache slots that a forward may read.

    There are few enough to capture one graph each, and enough to read little more than the filled slots.

    Attributes:
        step: every bucket is a multiple of it, except the last one.
    """

    step: int
    num_slots: int

    def covering(self, num_slots: int) -> int:
        """The smallest bucket with at least `num_slots` slots."""
        return min(-(-num_slots // self.step) * self.step, self.num_slots)


class Held(NamedTuple):
    """The beginning of a prompt that a row of the cache holds.

    Attributes:
        num_tokens: its number of tokens; the whole prompt only if another prompt of the same `Prompts` is equal.
        row: the row that holds it. This is the prompt's own, which needs no copy; or a row into which no prompt is
            being read; or the row of the equal prompt, or of a prompt of the same `Prompts` of which nothing is held.
        from_saved: whether the states after it are those that `Runner.save` kept.
    """

    num_tokens: int = 0
    row: int = 0
    from_saved: bool = False


class ShortForwards(NamedTuple):
    """Runs forwards of few tokens, whose inputs are at fixed addresses.

    Attributes:
        inputs_4M: ids, positions and rows of the tokens, and indices of the scored ones; M is the most tokens.
        most_scored: the most prompts of a forward.
        run: calls a function of the inputs of a number of tokens, or replays the call, which overwrites the result.
    """

    inputs_4M: Tensor
    most_scored: int
    run: Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]


class Prompts(NamedTuple):
    """Prompts to read.

    Attributes:
        tokens_RS: token ids; row r holds a prompt in its first lengths_R[r] slots.
        lengths_R: lengths of the prompts, on the device.
        lengths: the same, known to the host.
        longest: the length that padded prompts are read to: of the longest, here or on other ranks.
        held: of each prompt; empty if nothing is held of any.
        saved: of each prompt, the number of tokens (whole chunks, held or not) after which the state is kept; 0 for
            none. Empty if layers keep no states.
        short: reads a few tokens; None reads them like many.
    """

    tokens_RS: Tensor
    lengths_R: Tensor
    lengths: Sequence[int]
    longest: int
    held: Sequence[Held] = ()
    saved: Sequence[int] = ()
    short: ShortForwards | None = None

    def some(self, places: Sequence[int]) -> "Prompts":
        """Return the prompts at these indices; other prompts no longer affect the padded length."""
        indices = to_device(places, self.tokens_RS.device)
        lengths = [self.lengths[place] for place in places]
        held = [self.held[place] for place in places] if self.held else ()
        saved = [self.saved[place] for place in places] if self.saved else ()
        tokens_RS, lengths_R = self.tokens_RS[indices], self.lengths_R[indices]
        return Prompts(tokens_RS, lengths_R, lengths, max(lengths), held, saved, self.short)

    @property
    def starts(self) -> Sequence[int]:
        """Numbers of tokens of each prompt that are not read."""
        return [place.num_tokens for place in self.held] or [0] * len(self.lengths)


def read_prompts(
    runner: Runner,
    prompts: Prompts,
    *,
    rows: Sequence[int],
    buckets: Buckets,
    taps: Taps | None = None,
    num_left: int = 0,
) -> Tensor:
    """Fill the cache with each row's prompt, first the prompts of which it holds nothing, then the rest.

    Args:
        runner: the model.
        prompts: at least one, each of at least one token.
        rows: which rows of the cache they become.
        buckets: of the cache.
        taps: see `Runner.forward`.
        num_left: tokens at the end of each prompt that states do not take in yet: the caller reads them again.

    Returns:
        The logits (R, V) after each row's last prompt token.
    """
    padded = (
        _read_by_length if runner.is_invariant and not runner.is_recurrent else partial(_read_padded, num_left=num_left)
    )
    taps = taps and taps.of_prompts(prompts.lengths_R, rows)
    read = partial(_read_packed if runner.packs_prompts else padded, runner, buckets=buckets, taps=taps)
    if not any(prompts.starts):
        return read(prompts, rows=rows)
    numbers = [*enumerate(zip(prompts.starts, prompts.lengths, strict=True))]
    fresh = [place for place, (start, _) in numbers if not start]
    begun = [place for place, (start, length) in numbers if 0 < start < length]
    equal = [place for place, (start, length) in numbers if start == length]

    def copy(places: Sequence[int]) -> None:
        copies = defaultdict[Held, list[int]](list)
        for place in places:
            if prompts.held[place].row != rows[place] or prompts.held[place].from_saved:
                copies[prompts.held[place]].append(rows[place])
        for (num_tokens, from_row, from_saved), to_rows in copies.items():
            runner.copy(from_row, to_rows, num_tokens, from_saved=from_saved)
            if taps:
                taps.copy(from_row, to_rows, num_tokens)

    def read_some(places: Sequence[int]) -> Tensor:
        return read(prompts.some(places), rows=[rows[place] for place in places])

    found = [read_some(fresh)] if fresh else []
    copy(begun)
    # A state can only be read after the token that it follows, so that rows begin at one position. So do rows whose
    # bits depend on what is read together: the chunks of each begin and end where its own positions say.
    begin_alike = runner.is_recurrent or not (runner.is_invariant or runner.packs_prompts)
    starts = {prompts.starts[place] if begin_alike else 0 for place in begun}
    groups = [[place for place in begun if start in {0, prompts.starts[place]}] for start in sorted(starts)]
    found += map(read_some, groups)
    copy(equal)
    own_rows = [prompts.held[place].row if place in equal else row for place, row in enumerate(rows)]
    return _in_order(found, [rows[place] for place in chain(fresh, *groups)], own_rows)


def _in_order(found: list[Tensor], read: Iterable[int], wanted: Iterable[int]) -> Tensor:
    """Return the logits of the `wanted` rows, or indices, from logits that were computed in the order of `read`."""
    numbers = {row: number for number, row in enumerate(read)}
    return torch.cat(found).index_select(0, to_device([numbers[row] for row in wanted], found[0].device))


def num_common(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two texts of one type, which are compared by slices."""
    low, high = 0, min(len(ids), len(other_ids))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == other_ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def forwards_per_prompt(runner: Runner, lengths: Sequence[int]) -> list[int]:
    """Return how many forwards read a part of each prompt, if `read_prompts` reads all and nothing is held."""
    if runner.packs_prompts:
        chunk = PREFILL_CHUNK * len(lengths)
        ends = accumulate(lengths)
        return [(end - 1) // chunk - (end - length) // chunk + 1 for end, length in zip(ends, lengths, strict=True)]
    groups = _by_length(lengths) if runner.is_invariant else [range(len(lengths))]
    found = {place: -(-max(lengths[other] for other in group) // PREFILL_CHUNK) for group in groups for place in group}
    return [found[place] for place in range(len(lengths))]


def _by_length(widths: Sequence[int]) -> list[list[int]]:
    """Divide prompts with `widths` tokens to read: each group is one prompt, or fits into a chunk."""
    groups: list[list[int]] = []
    for place in sorted(range(len(widths)), key=widths.__getitem__):
        if groups and (len(groups[-1]) + 1) * widths[place] <= PREFILL_CHUNK:
            groups[-1].append(place)
        else:
            groups.append([place])
    return [sorted(group) for group in groups]


def _read_by_length(
    runner: Runner, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets, taps: Taps | None
) -> Tensor:
    widths = [length - start for length, start in zip(prompts.lengths, prompts.starts, strict=True)]
    read, groups = partial(_read_padded, runner, buckets=buckets, taps=taps), _by_length(widths)
    if len(groups) == 1:
        return read(prompts, rows=rows)
    found = [read(prompts.some(group), rows=[rows[place] for place in group]) for group in groups]
    return _in_order(found, chain(*groups), range(len(rows)))


def _read_padded(
    runner: Runner, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets, taps: Taps | None, num_left: int = 0
) -> Tensor:
    tokens_RS, lengths_R, lengths, longest, *_ = prompts
    first, saved = [0] * len(rows), prompts.saved or [0] * len(rows)
    device, width, last_R1 = tokens_RS.device, longest, lengths_R[:, None] - 1
    if any(prompts.starts):
        width = max(length - start for length, start in zip(lengths, prompts.starts, strict=True))
        # A row with less to read than others begins earlier, so that none goes on past the longest prompt.
        first = [min(start, longest - width) for start in prompts.starts]
        first_R1 = to_device(first, device)[:, None]
        last_R1 = last_R1 - first_R1
    rows_R = to_device(rows, device)
    logits_RV: Tensor | None = None
    has_masks, stop = getattr(runner, "uses_masks", False), 0
    while (start := stop) < width:
        behind = max(first) + (start // PREFILL_CHUNK + 1) * PREFILL_CHUNK
        stop = min(start + (masked_chunk(PREFILL_CHUNK, behind) if has_masks else PREFILL_CHUNK), width)
        positions_RT = torch.arange(start, stop, device=device).expand(len(rows), -1)
        positions_RT = first_R1 + positions_RT if any(first) else positions_RT.contiguous()
        # On a CPU an operator after another model's forward takes up to 70 us: few where one chunk is all.
        score_R1 = last_R1 if stop - start == width else (last_R1 - start).clamp(0, stop - start - 1)
        taken_R = (last_R1[:, 0] + 1 - num_left - start).clamp(0, stop - start) if runner.is_recurrent else None
        chunk_R1V = runner.forward(
            tokens_RS.gather(1, positions_RT),
            positions_RT,
            bucket=buckets.covering(max(first) + stop),
            score_positions_BR=score_R1,
            cache_rows_B=rows_R,
            taps=taps,
            taken_B=taken_R,
        )
        for row, first_of_row, num_tokens in zip(rows, first, saved, strict=True):
            if first_of_row + stop == num_tokens:
                runner.save(row, num_tokens)
        if logits_RV is None:
            logits_RV = chunk_R1V[:, 0]
        else:
            logits_RV = torch.where((last_R1 >= start) & (last_R1 < stop), chunk_R1V[:, 0], logits_RV)
    assert logits_RV is not None, "a prompt has at least one token"
    return logits_RV


def _read_packed(
    runner: Runner, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets, taps: Taps | None
) -> Tensor:
    if prompts.short and not isinstance(runner, NullRunner) and _is_short(prompts):
        return _read_short(runner, prompts, prompts.short, rows=rows, buckets=buckets, taps=taps)
    device, num_slots = prompts.tokens_RS.device, prompts.tokens_RS.shape[1]
    lengths_R, rows_R = torch.tensor(prompts.lengths), torch.tensor(rows)
    all_places = torch.arange(len(rows)).repeat_interleave(lengths_R - torch.tensor(prompts.starts))
    pieces = zip(prompts.starts, prompts.lengths, strict=True)
    all_positions = torch.cat([torch.arange(start, length) for start, length in pieces])
    chunk = PREFILL_CHUNK * len(rows)  # as many tokens as padded prompts have
    found = []
    for places_M, positions_M in zip(all_places.split(chunk), all_positions.split(chunk), strict=True):
        places_C, counts_C = places_M.unique_consecutive(return_counts=True)
        first_C1 = torch.cat([torch.zeros(1, dtype=torch.int64), counts_C.cumsum(0)])
        last_C = first_C1[1:] - 1
        used_C = positions_M[last_C] + 1
        slots_M, rows_M, on_device_M = to_device(
            torch.stack([places_M * num_slots + positions_M, rows_R[places_M], positions_M]), device
        )
        rows_C, score_C = to_device(torch.stack([rows_R[places_C], last_C]), device)
        logits_1CV = runner.forward(
            prompts.tokens_RS.flatten().index_select(0, slots_M)[None],
            on_device_M[None],
            bucket=buckets.covering(prompts.longest),
            score_positions_BR=score_C[None],
            taps=taps,
            pieces=Pieces(
                rows_M, rows_C, to_device(used_C.int(), device), to_device(first_C1.int(), device), int(counts_C.max())
            ),
        )
        num_ended = int((used_C == lengths_R[places_C]).sum())  # only the last prompt may go on
        found.append(logits_1CV[0, :num_ended])
    return torch.cat(found)


def _is_short(prompts: Prompts) -> bool:
    counts = [length - start for start, length in zip(prompts.starts, prompts.lengths, strict=True)]
    num_slots = sum(count * length for count, length in zip(counts, prompts.lengths, strict=True))
    return short_size(sum(counts)) > 0 and num_slots <= _SHORT_SLOTS


def _read_short(
    runner: Runner, prompts: Prompts, short: ShortForwards, *, rows: Sequence[int], buckets: Buckets, taps: Taps | None
) -> Tensor:
    pieces = [range(start, length) for start, length in zip(prompts.starts, prompts.lengths, strict=True)]
    tokens = [(place, position) for place, piece in enumerate(pieces) for position in piece]
    last = [end - 1 for end in accumulate(map(len, pieces))]
    size = short_size(len(tokens))
    places, positions = zip(*tokens, *tokens[-1:] * (size - len(tokens)), strict=True)
    slots = [place * prompts.tokens_RS.shape[1] + position for place, position in zip(places, positions, strict=True)]
    numbers = [slots, positions, [rows[place] for place in places], last + last[-1:] * (size - len(last))]
    numbers_4M, inputs_4M = to_device(numbers, prompts.tokens_RS.device), short.inputs_4M[:, :size]
    inputs_4M[0].copy_(prompts.tokens_RS.flatten().index_select(0, numbers_4M[0]))
    inputs_4M[1:].copy_(numbers_4M[1:])

    def read(inputs_4M: Tensor) -> Tensor:
        ids_1M, positions_1M, (rows_M,), scored_1M = inputs_4M[:, None].unbind()
        first_M1 = torch.arange(size + 1, dtype=torch.int32, device=rows_M.device)
        logits_1RV = runner.forward(
            ids_1M,
            positions_1M,
            bucket=buckets.num_slots,
            score_positions_BR=scored_1M[:, : short.most_scored],
            taps=taps,
            pieces=Pieces(rows_M, rows_M, (positions_1M[0] + 1).int(), first_M1, 1),
        )
        return logits_1RV[0]

    return short.run(size, read, inputs_4M)[: len(rows)].clone()
