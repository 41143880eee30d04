"""What scoring sees of an episode: the row's supervision, executed queries, passages as shown, model-origin text."""

from __future__ import annotations

from dataclasses import dataclass

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.rewards.structure import Piece, Verdict, check_structure
from search_r1.rewards.text import Metric, normalise
from verl.types import Origin, SearchCall, Trajectory


@dataclass(frozen=True)
class EpisodeView:
    """A scored episode's material. The prompt is not in it, so nothing in a prompt can change a score."""

    row: Row
    prediction: str | None
    failed: bool
    searches: tuple[SearchCall, ...]
    """Executed and answered searches only."""
    pieces: tuple[Piece, ...]
    """The text behind the prompt, by origin."""

    @classmethod
    def of(cls, trajectory: Trajectory, codec: Codec) -> EpisodeView:
        """Read a trajectory. In a fixed pipeline the environment wrote the first turn; it is read as such."""
        pieces = [
            Piece(codec.readable(segment.token_ids), from_model=segment.origin is Origin.MODEL)
            for segment in trajectory.segments
            if segment.origin is not Origin.PROMPT
        ]
        return cls(
            row=Row.from_json(trajectory.row),
            prediction=trajectory.prediction,
            failed=trajectory.stop.failed,
            searches=tuple(call for call in trajectory.searches if call.error is None),
            pieces=tuple(pieces),
        )

    def structure(self, relaxed: bool = True) -> Verdict:
        """Check the think/search/answer structure."""
        return check_structure(self.pieces, relaxed)

    def intent(self, metric: Metric) -> tuple[float, int] | None:
        """Return (best score of an executed query against the gold rewrite, its turn); None without a rewrite.

        Without any query the score is 0 and the turn -1. Of equal queries the earliest counts.
        """
        if not self.row.rewrite:
            return None
        score, turn = 0.0, -1
        for call in self.searches:
            value = metric(call.query, self.row.rewrite)
            if value > score:
                score, turn = value, call.turn
        return score, turn

    def retrieved_gold(self, top: int | None = None) -> bool | None:
        """Say whether a shown passage (of the first ``top`` of a search) is gold; None without supervision.

        Passages are matched by id when the row has ids, else by the gold text standing whole in what was shown.
        """
        shown = [document for call in self.searches for document in call.documents[:top]]
        if self.row.gold_passage_ids:
            return any(document.id in self.row.gold_passage_ids for document in shown)
        if self.row.gold_text and (wanted := normalise(self.row.gold_text)):
            return any(wanted in normalise(f"{document.title} {document.text}") for document in shown)
        return None

    def retrieved_answer(self) -> bool:
        """Say whether a shown passage contains one of the references (Search-R1's retrieval test)."""
        wanted = [text for text in map(normalise, self.row.answers) if text]
        shown = [normalise(f"{d.title} {d.text}") for call in self.searches for d in call.documents]
        return any(text in passage for text in wanted for passage in shown)


def shown_text(view: EpisodeView) -> str:
    """Return the whole text behind the prompt, as saved in ``raw_predicted_answer``."""
    return "".join(piece.text for piece in view.pieces)
