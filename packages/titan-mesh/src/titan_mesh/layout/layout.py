"""`Layout`: the coordinates and groups of `RankLayout`, with explanation, validation and comparison."""

from dataclasses import dataclass

from titan_mesh.layout.diff import LayoutDiff, compare
from titan_mesh.layout.explain import AxisRow, explain_layout, explain_rank, rows
from titan_mesh.layout.ranks import RankLayout
from titan_mesh.layout.validate import Issue, find_issues


@dataclass(frozen=True)
class Layout(RankLayout):
    """Every rank's coordinates and groups, for a world of any size, without torch.

    Raises:
        ValueError: The degrees do not make up ``world_size`` ranks (see `MeshSpec.resolve`).
    """

    def validate(
        self,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        hidden: int | None = None,
        vocab: int | None = None,
        seq_len: int | None = None,
        layers: int | None = None,
        experts: int | None = None,
        batch: int | None = None,
        microbatches: int | None = None,
        sequence_parallel: bool = True,
    ) -> list[Issue]:
        """What does not fit between this layout, a model and a batch. An empty list means all fits.

        Args:
            heads: Query heads of an attention layer.
            kv_heads: Key and value heads.
            hidden: Width of the feed-forward's inner layer.
            vocab: Rows of the output head.
            seq_len: Tokens of a sequence.
            layers: Decoder blocks.
            experts: Experts of a layer.
            batch: Sequences of one optimizer step, over all ranks.
            microbatches: Parts a rank's share of the batch runs in.
            sequence_parallel: Activations outside attention and feed-forward are cut over ``tp`` as well.
        """
        return find_issues(
            self,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            vocab=vocab,
            seq_len=seq_len,
            layers=layers,
            experts=experts,
            batch=batch,
            microbatches=microbatches,
            sequence_parallel=sequence_parallel,
        )

    def table(self) -> list[AxisRow]:
        """One row for each name above size 1: size, stride, number of groups, example, nodes, link."""
        return rows(self)

    def explain(self, rank: int | None = None) -> str:
        """A table of every axis; with ``rank``, that rank's place and the ranks it meets on every axis."""
        return explain_layout(self) if rank is None else explain_rank(self, rank)

    def diff(self, other: RankLayout) -> LayoutDiff:
        """Which ranks change place or company between this layout and ``other``."""
        return compare(self, other)

    def __hash__(self) -> int:
        return super().__hash__()
