"""The table of placements under test: for each number of ranks, which ranks hold what."""

from dataclasses import dataclass, replace

from llama_ssp.settings.schema import (
    DraftLayout,
    DraftPlacement,
    Offload,
    PlacementConfig,
    TargetKind,
    TargetPlacement,
    WholeParts,
)

ACCELERATE, DEEPSPEED = TargetKind.accelerate, TargetKind.deepspeed
ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout
NONE, EMBEDDING, ATTENTION = WholeParts


@dataclass(frozen=True)
class Cell:
    """One placement of one pair, and the rows decoded together."""

    target: tuple[int, ...]
    draft: tuple[int, ...]
    """Its ranks; none are those of prompt look-up."""
    kind: DraftLayout
    pair: str = "tiny"
    batch_size: int = 17
    target_kind: TargetKind = TargetKind.tensor
    max_memory_gb: float | None = None
    """Of weights on a device; the rest is on disk."""
    rule: str = "speculative"
    whole: WholeParts = EMBEDDING
    """What each rank of a sharded draft holds whole."""
    tree: str | None = None
    """The shape of drafted trees; None for chains."""
    adapts: bool = False
    """K is chosen for each round, and prompt look-up is the fallback."""
    heavy: bool = False
    """Its tests run with --heavy alone; those of more than two ranks do so anyway."""
    slow: bool = False
    """Its tests run with --slow alone."""

    @property
    def placement(self) -> PlacementConfig:
        """As a config has it."""
        return PlacementConfig(
            target=TargetPlacement(
                kind=self.target_kind,
                ranks=list(self.target),
                offload=Offload.disk if self.max_memory_gb else Offload.none,
                max_memory_gb=self.max_memory_gb,
            ),
            draft=DraftPlacement(kind=self.kind, ranks=list(self.draft), whole=self.whole),
        )

    def __str__(self) -> str:
        target, draft = (",".join(map(str, ranks)) for ranks in (self.target, self.draft))
        kind = "" if self.target_kind is TargetKind.tensor else f"{self.target_kind.name} "
        disk = " and disk" if self.max_memory_gb else ""
        rule = "" if self.rule == "speculative" else f" by {self.rule}"
        whole = "" if self.whole is EMBEDDING else f" {self.whole.name} whole"
        where = f"draft {self.kind.name} {draft}" if self.draft else "look-up"
        drafting = f"{where}{whole}{' adaptive' if self.adapts else ''}"
        drafting += f" tree {self.tree}" if self.tree else ""
        return f"{self.pair} {kind}target {target}{disk} {drafting} batch {self.batch_size}{rule}"


CELLS = {
    1: [
        Cell((0,), (0,), SHARDED, heavy=True),
        Cell((0,), (0,), REPLICATED, slow=True),
        Cell((0,), (0,), ONE_RANK, pair="llama", batch_size=1, target_kind=ACCELERATE, heavy=True),
        Cell((0,), (0,), ONE_RANK, target_kind=ACCELERATE, max_memory_gb=0.04, slow=True),
        *(
            Cell((0,), (0,), ONE_RANK, pair=pair, batch_size=3, target_kind=ACCELERATE, max_memory_gb=3e-4, heavy=True)
            for pair in ("llama", "gpt_neox")
        ),
        Cell((0,), (0,), ONE_RANK, pair="gpt_neo", batch_size=3, target_kind=ACCELERATE, heavy=True),
    ],
    2: [
        Cell((0, 1), (1,), ONE_RANK, heavy=True),
        Cell((0, 1), (0,), SHARDED, slow=True),
        Cell((0, 1), (0, 1), SHARDED),
        Cell((0, 1), (0, 1), SHARDED, whole=ATTENTION),
        Cell((0, 1), (0, 1), SHARDED, whole=NONE, heavy=True),
        Cell((0, 1), (0, 1), REPLICATED, heavy=True),
        Cell((0,), (1,), OWN_GPU),
        Cell((0,), (1,), OWN_GPU, pair="head", batch_size=3),
        Cell((0, 1), (0, 1), SHARDED, pair="head", batch_size=3),
        Cell((0,), (1,), OWN_GPU, pair="head", batch_size=3, tree="2x2x1"),
        Cell((0, 1), (0, 1), SHARDED, batch_size=5, tree="3x2x1"),
        Cell((0, 1), (), REPLICATED, batch_size=5, tree="3x2x1"),
        Cell((0,), (1,), OWN_GPU, pair="head", batch_size=3, tree="dynamic-8x3x3"),
        Cell((0, 1), (0, 1), SHARDED, batch_size=5, tree="iid-3x2x1", heavy=True),
        Cell((0, 1), (0, 1), SHARDED, batch_size=5, tree="dynamic-8x3x3", heavy=True),
        Cell((0, 1), (0, 1), REPLICATED, pair="head", batch_size=3, heavy=True),
        Cell((1,), (0,), OWN_GPU, pair="head", batch_size=3, rule="coupled", adapts=True, heavy=True),
        Cell((1,), (0, 1), SHARDED, slow=True),
        Cell((0, 1), (0, 1), REPLICATED, pair="gpt_neox", slow=True),
        Cell((0, 1), (0, 1), SHARDED, pair="gpt_neo", batch_size=3, slow=True),
        Cell((1,), (0,), OWN_GPU, pair="gpt_neox", batch_size=3, target_kind=ACCELERATE, heavy=True),
        Cell((0,), (0, 1), SHARDED, target_kind=ACCELERATE, heavy=True),
        Cell((0, 1), (0, 1), SHARDED, pair="llama", batch_size=1, heavy=True),
        Cell((0, 1), (0, 1), SHARDED, pair="gpt_neox", batch_size=3, whole=ATTENTION, heavy=True),
        Cell((0, 1), (0, 1), REPLICATED, pair="llama", batch_size=1, slow=True),
        Cell((0, 1), (0, 1), SHARDED, pair="gpt_neo", batch_size=1, slow=True),
        Cell((0, 1), (0, 1), REPLICATED, pair="gpt_neo", batch_size=3, slow=True),
        Cell((0,), (1,), OWN_GPU, pair="gpt_neo", batch_size=3, heavy=True),
        Cell((0,), (1,), OWN_GPU, rule="block", slow=True),
        Cell((0, 1), (0, 1), REPLICATED, rule="block", heavy=True),
        Cell((0,), (1,), OWN_GPU, rule="coupled", heavy=True),
        Cell((0, 1), (0,), SHARDED, rule="coupled", adapts=True, slow=True),
        Cell((0,), (1,), OWN_GPU, rule="coupled", adapts=True, slow=True),
        Cell((0, 1), (0, 1), REPLICATED, rule="coupled", adapts=True, heavy=True),
        Cell((0, 1), (0, 1), REPLICATED, rule="coupled", slow=True),
    ],
    3: [
        Cell((0, 1, 2), (2,), ONE_RANK),
        Cell((0, 1, 2), (1,), SHARDED, slow=True),
        Cell((0, 1, 2), (1, 2), SHARDED, slow=True),
        Cell((0, 1, 2), (0, 1, 2), REPLICATED),
        Cell((1, 2), (0,), OWN_GPU, slow=True),
        Cell((0, 1, 2), (0, 1, 2), SHARDED, pair="head", batch_size=5),
        Cell((0, 2), (1, 2), SHARDED, slow=True),
        Cell((1,), (0, 2), OWN_GPU, slow=True),
        Cell((0, 1), (2,), OWN_GPU, pair="gpt_neox", batch_size=1, slow=True),
        Cell((1,), (0, 2), OWN_GPU, pair="gpt_neo", batch_size=1, target_kind=ACCELERATE, slow=True),
    ],
    4: [
        Cell((0, 1, 2, 3), (3,), ONE_RANK),
        Cell((0, 1, 2, 3), (2,), SHARDED),
        Cell((0, 1, 2, 3), (1, 2), SHARDED),
        Cell((0, 1, 2, 3), (0, 1, 2, 3), SHARDED, whole=ATTENTION),
        Cell((0, 1, 2, 3), (0, 1, 2, 3), REPLICATED),
        Cell((0, 1, 2, 3), (1, 3), REPLICATED),
        Cell((0, 1, 2), (3,), ONE_RANK),
        Cell((1, 3), (0, 2), OWN_GPU),
        Cell((0, 1, 2, 3), (0, 1), SHARDED, pair="gpt_neox"),
        Cell((0, 1, 2, 3), (0, 1, 2, 3), REPLICATED, pair="gpt_neox", batch_size=3),
    ],
    5: [Cell((0, 1, 2, 3), (4,), OWN_GPU)],
}

ONLY_HEAVY = "only heavy"
"""The lane of `-m heavy`, which leaves out what the default tests compare."""
MOST_DEFAULT_RANKS, MOST_HEAVY_RANKS = 2, 3
"""Larger groups are started with --heavy, and with --slow alone."""

DEEPSPEED_CELLS = {
    1: [Cell((0,), (0,), ONE_RANK, target_kind=DEEPSPEED, batch_size=9)],
    2: [
        Cell((0, 1), (0,), ONE_RANK, target_kind=DEEPSPEED),
        Cell((0, 1), (0, 1), SHARDED, pair="llama", batch_size=3, target_kind=DEEPSPEED),
        Cell((0, 1), (0, 1), REPLICATED, pair="gpt_neox", batch_size=3, target_kind=DEEPSPEED),
    ],
}
"""Started apart, where the package is installed, with what one rank makes of the same rows without it."""


def cells_of(num_ranks: int, lane: str) -> list[Cell]:
    """The cells that the tests of a lane ask of a group of this size."""
    if lane == "default":
        return [cell for cell in CELLS[num_ranks] if not (cell.heavy or cell.slow)]
    found = [cell for cell in CELLS[num_ranks] if lane == "slow" or not cell.slow]
    is_known = lane == ONLY_HEAVY and num_ranks <= MOST_DEFAULT_RANKS
    return [cell for cell in found if cell.heavy or not is_known]


PAIRS = ("tiny", "head", "llama", "gpt_neox", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_neo")
HEAVY_PAIRS, SLOW_PAIRS = ("llama", "gpt_neox", "gpt_neo"), ("qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
"""Their texts are compared with --heavy, on at most `MOST_DEFAULT_RANKS`; and with --slow alone."""
SIZES = (1, 2, 3, 4)
"""Numbers of ranks on which every pair is tried; others have their cells of the table alone."""


def lane_of(name: str, num_ranks: int) -> str:
    """The lane that compares a pair's texts on a number of ranks."""
    is_heavy, is_large = name in HEAVY_PAIRS, num_ranks > MOST_DEFAULT_RANKS
    if num_ranks > MOST_HEAVY_RANKS or name in SLOW_PAIRS or (is_heavy and is_large):
        return "slow"
    return "heavy" if is_heavy or is_large else "default"


def on_one_rank(cell: Cell) -> Cell:
    """The same pair, rows and rule on one rank of our own, with one K."""
    return replace(
        cell, target=(0,), draft=cell.draft and (0,), kind=ONE_RANK, target_kind=TargetKind.tensor, whole=EMBEDDING,
        adapts=False, heavy=False, slow=False,
    )  # fmt: skip
