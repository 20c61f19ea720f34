"""`ClipProcessor`: what a model family adds to a clip; registered under ``mm_trainer.clip_processors``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


class ClipFiles(Protocol):
    """The further files of one sample, as its row of the metadata names them."""

    def paths(self, column: str) -> list[str]:
        """The paths in a column of the row; none if it has none."""
        ...

    def read(self, column: str, path: str) -> Tensor:
        """(3, F, H, W) uint8: a video, or an image shown throughout, cut out in space and time as the clip is.

        Raises:
            mm_trainer.errors.BadSample: the file can't be read.
        """
        ...

    def read_whole(self, column: str, path: str) -> Tensor:
        """(3, H, W) uint8: an image as a whole, its aspect kept, in the middle of a white canvas of the clip's size.

        Raises:
            mm_trainer.errors.BadSample: the file can't be read.
        """
        ...


@runtime_checkable
class ClipProcessor(Protocol):
    """Adds entries to a sample of the ``video`` data set; named by ``processor`` and made without arguments.

    It travels to data workers, so it holds nothing that can't be pickled.
    """

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the metadata that hold paths for it, all optional; they become part of a cached sample's
        identity."""
        ...

    @property
    def entries(self) -> Sequence[str]:
        """Names of what `process` adds. A run whose model reads none of them (``clip_entries`` of the pipeline, the
        container or the single model) is refused."""
        ...

    def group(self, counts: Mapping[str, int]) -> Hashable:
        """What samples of one micro-batch must have in common besides their size.

        Args:
            counts: for each of `columns`, how many paths the sample's row has there.
        """
        ...

    def process(self, video: Tensor, files: ClipFiles) -> Mapping[str, Tensor]:
        """The entries to add, all that `entries` names and no others.

        Args:
            video: (3, F, H, W) uint8, the clip itself; see [Note: pixels] in `mm_trainer.data.batch`.
            files: where the rest is read from.

        Raises:
            mm_trainer.errors.BadSample: this sample can't be used.
        """
        ...
