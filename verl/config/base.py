"""What every configuration section shares: frozen, closed, and documented by the strings under its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are errors; the docstring under a field is its entry in the manual."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


def _as_tuple(value: Any) -> Any:
    """Accept one path where a list of paths is meant, as the published scripts do."""
    return (value,) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""One path or a list of paths; always a tuple after validation."""


Decay = Annotated[float, Ge(0.0), Lt(1.0)]
"""Share of a running mean that stays from one step to the next."""

Seed = Annotated[int, Ge(0), Lt(2**63)]
"""What every generator of random numbers accepts."""


Sinks = tuple[Literal["console", "tensorboard", "wandb", "trackio", "mlflow"], ...]
"""Names of ``verl.tracking.SINKS``."""

TEMPLATES = ("chatr1", "search_r1", "compact", "row")


def _template(value: str) -> str:
    if value not in TEMPLATES and not value.endswith(".txt"):
        raise ValueError("must be 'chatr1', 'search_r1', 'compact' or 'row', or a text file that ends in .txt")
    return value


Template = Annotated[str, AfterValidator(_template)]
"""A prompt template: a built-in name or the path of a text file."""


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of every key that is not itself a section, in declaration order."""
    for name, field in type(section).model_fields.items():
        if field.exclude:  # what the loader fills in is no key
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
