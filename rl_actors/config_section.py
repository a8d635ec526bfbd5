"""What all sections of a configuration have in common."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MOST = 2**31 - 1
"""The largest whole number: libraries below hold tokens, counts and seeds in 32 bits."""
Threads = Annotated[int, Field(gt=0, le=2**12)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Frozen; unknown settings, numbers without end and numbers that are written as true are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *map(_plain, get_args(annotation))}:
            raise ValueError("write a number, not true or false")
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError(f"no number of a run is that large: use at most {MOST}")
        return value


def _plain(annotation: Any) -> Any:
    """The type under an Annotated."""
    return getattr(annotation, "__origin__", annotation)
