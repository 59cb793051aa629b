"""The base class of all configuration sections, and the types of their keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Width = Annotated[int, Field(ge=1, le=2**24)]  # of a tensor; a greater one would be no model but a slip
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Between0And1 = Annotated[float, Field(gt=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Paths = Annotated[list[Text], Field(min_length=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, with strict types, without unknown keys.

    The docstring below a key is its description: `cdrmix config` prints it, and docs/configuration.md is made of them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
