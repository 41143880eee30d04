"""What scoring sees of an episode: the row's supervision, executed queries, passages as shown, model-origin text."""

from __future__ import annotations

from dataclasses import dataclass

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.parsing import TurnKind
from search_r1.rewards.structure import Piece, Verdict, check_structure
from search_r1.rewards.text import Metric, Normalise, normalise
from verl.types import Document, Origin, SearchCall, Trajectory


@dataclass(frozen=True, slots=True)
class Found:
    """How much of a row's gold was shown to the model."""

    found: int
    """Different gold passages that were shown."""
    total: int
    """Gold passages of the row, at least 1."""

    @property
    def hit(self) -> float:
        """1 when any gold passage was shown."""
        return float(self.found > 0)

    @property
    def recall(self) -> float:
        """Share of the gold passages that was shown."""
        return self.found / self.total


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
    turns: tuple[str, ...] = ()
    """Outcome of each model turn, see ``TurnKind``."""

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
            turns=trajectory.turns,
        )

    def structure(self, relaxed: bool = True) -> Verdict:
        """Check the think/search/answer structure."""
        return check_structure(self.pieces, relaxed)

    @property
    def invalid_actions(self) -> int:
        """Turns that were spent without an action: empty query, malformed, cut, ended."""
        return sum(TurnKind(turn).invalid for turn in self.turns)

    def intent(self, metric: Metric, form: Normalise = normalise) -> tuple[float, int] | None:
        """Return (best score of an executed query against the gold rewrite, its turn); None without a rewrite.

        Without any query the score is 0 and the turn -1. Of equal queries the earliest counts.
        """
        if not self.row.rewrite:
            return None
        score, turn = 0.0, -1
        for call in self.searches:
            value = metric(call.query, self.row.rewrite, form)
            if value > score:
                score, turn = value, call.turn
        return score, turn

    def gold(self, match: str = "auto", top: int | None = None, form: Normalise = normalise) -> Found | None:
        """Say how much gold the first ``top`` passages of the searches held; None without supervision of this kind.

        ``match``: ``id``, ``text``, or ``auto``: by id where the row has ids, else by text.

        A gold text has no parts, so by text one of one can be found, where it stands whole in what was shown.
        """
        shown = [document for call in self.searches for document in call.documents[:top]]
        ids = set(self.row.gold_passage_ids or ()) if match in ("auto", "id") else set()
        if ids:
            return Found(len(ids & {document.id for document in shown}), len(ids))
        wanted = form(self.row.gold_text or "") if match in ("auto", "text") else ""
        if wanted:
            return Found(int(any(wanted in form(_text(document)) for document in shown)), 1)
        return None

    def retrieved_answer(self, form: Normalise = normalise) -> bool:
        """Say whether a shown passage contains one of the references (Search-R1's retrieval test)."""
        wanted = [text for text in map(form, self.row.answers) if text]
        shown = [form(_text(document)) for call in self.searches for document in call.documents]
        return any(text in passage for text in wanted for passage in shown)


def is_gold(document: Document, row: Row, form: Normalise = normalise) -> bool:
    """Say whether one passage is gold, by id where the row has ids, else by text."""
    if row.gold_passage_ids:
        return document.id in row.gold_passage_ids
    wanted = form(row.gold_text or "")
    return bool(wanted) and wanted in form(_text(document))


def shown_text(view: EpisodeView) -> str:
    """Return the whole text behind the prompt, as saved in ``raw_predicted_answer``."""
    return "".join(piece.text for piece in view.pieces)


def _text(document: Document) -> str:
    return f"{document.title} {document.text}"
