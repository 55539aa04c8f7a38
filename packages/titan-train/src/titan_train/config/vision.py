"""Vision-language: where images and texts come from, and how large an image may be."""

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, CountOrOff, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Images with questions and answers (vision-language models)."""

    source: Literal["shapes", "jsonl"] = "shapes"
    """shapes renders coloured shapes with questions, for tests and as an example; jsonl reads the files of paths."""

    paths: tuple[str, ...] = ()
    """JSONL files of source jsonl; the last part may be a pattern. A line has "prompt", "answer" and "image": a file relative
    to the JSONL file, a member of a tar shard ("shard.tar/cat.jpg"), a list of them, or none."""

    min_image_tokens: Count = 4
    """Smaller images are enlarged to as many tokens."""

    max_image_tokens: int = 1024
    """Larger images are reduced to as many tokens."""

    max_pixels: Annotated[int, Range(1, 178_956_970, note="Pillow opens no larger image: reduce such images first")] = (
        50_000_000
    )
    """Image files with more pixels are quarantined, before they are decoded."""

    threads: Count = 4
    """Threads of each rank that decode images."""

    items: Count = 20_000
    """Images of source shapes in an epoch."""

    held_out: Annotated[int, Range(0, note="0 holds out nothing")] = 512
    """Items held out for validation; 0 for none."""

    sample_answers: CountOrOff = 0
    """Held-out questions whose answers each validation scores, with their images and with shuffled ones; 0 disables."""

    def __post_init__(self) -> None:
        check_values("vision", self)
        if self.max_image_tokens < self.min_image_tokens:
            raise ValueError(
                f"vision.max_image_tokens={self.max_image_tokens} is below vision.min_image_tokens={self.min_image_tokens}. The "
                f"nearest valid choice is {self.min_image_tokens}."
            )
        if self.sample_answers > self.held_out:
            raise ValueError(
                f"vision.sample_answers={self.sample_answers} is more than vision.held_out={self.held_out}, from which they are "
                f"taken. The nearest valid choice is {self.held_out}."
            )
        if self.source == "jsonl" and not self.paths:
            raise ValueError("vision.source='jsonl' without vision.paths: there is nothing to read. Name JSONL files.")
