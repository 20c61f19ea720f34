"""The section ``data``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mm_trainer.config.sections.fields import LocalPath, OpenSection, Section
from mm_trainer.errors import FieldError, MissingField


class DatasetEntry(OpenSection):
    """One data set; keys that are not listed here belong to its type."""

    dataset_type: str | None = None
    """Name in the entry-point group mm_trainer.datasets."""
    tokenizer: LocalPath | None = None
    """Folder of the text encoder's tokenizer."""


class MixEntry(DatasetEntry):
    """One data set of a mix."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share in the mix, relative to the others'; null for all of them: as large as each is."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """How often an epoch of the mix goes through this data set."""


class DatasetParam(DatasetEntry):
    """One data set, or several mixed."""

    datasets: tuple[MixEntry, ...] | None = Field(default=None, min_length=1)
    """Data sets to mix; keys next to this list apply to all of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        weightless = [i for i, entry in enumerate(self.datasets or ()) if entry.weight is None]
        if weightless and len(weightless) < len(self.datasets or ()):
            raise FieldError(
                ("datasets", weightless[0]), "weight is missing; give it to all data sets of a mix or to none"
            )
        return self


class DataLoaderParam(Section):
    """``data.dataloader_param``."""

    shuffle: bool = True
    num_workers: Annotated[int, Field(ge=0)] = 2
    """Processes per rank that read ahead; 0 reads in the rank itself."""
    pin_memory: bool | Literal["auto"] = "auto"
    """auto: where there is an accelerator."""
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    """Micro-batches that each worker keeps ready."""


class DataConfig(Section):
    """What is trained on."""

    dataset_param: DatasetParam
    val_dataset_param: DatasetParam | None = None
    """The data set of validations."""
    cache: LocalPath | None = None
    """Folder made by `mm-trainer cache`."""
    on_bad_sample: Literal["replace", "error"] = "replace"
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of unusable samples above which the run stops."""
    dataloader_param: DataLoaderParam = DataLoaderParam()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("dataset_param", "val_dataset_param"):
            param: DatasetParam | None = getattr(self, name)
            if param is None or param.dataset_type is not None:
                continue
            if param.datasets is None:
                raise MissingField((name, "dataset_type"))
            for i, entry in enumerate(param.datasets):
                if entry.dataset_type is None:
                    raise MissingField((name, "datasets", i, "dataset_type"))
        return self
