"""JsonFields: typed reading of one JSON object, with errors that name the file and the field."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LARGEST_COUNT = 2**63 - 1  # no tensor has more rows


@dataclass(frozen=True, slots=True)
class JsonFields:
    """One JSON object of a file. An absent field and null are the same.

    Attributes:
        file: where the object was read from.
        values: the object.
        prefix: the name of the object in the file, with a dot: `rope_scaling.`, say.
    """

    file: Path
    values: Mapping[str, object]
    prefix: str = ""

    def get(self, name: str) -> object:
        """Return the field's value, unchecked; None if absent."""
        return self.values.get(name)

    def error(self, name: str, what: str) -> ModelConfigError:
        """Return (not raise) the error that says what is wrong with a field."""
        shown = "(absent)"
        if name in self.values:
            value = repr(self.values[name])
            shown = f"= {value}" if len(value) <= 80 else f"= {value[:77]}..."  # noqa: PLR2004 -- one line
        return ModelConfigError(f"{self.file}: {self.prefix}{name} {shown} {what}.")

    def require(self, name: str, is_right: object, what: str) -> None:
        """Raise the error of a field that is not right."""
        if not is_right:
            raise self.error(name, what)

    def section(self, name: str) -> JsonFields | None:
        """Return the JSON object in a field, None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be a JSON object")
        return JsonFields(self.file, value, f"{self.prefix}{name}.")

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1 to LARGEST_COUNT."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
            raise self.error(name, f"must be a whole number from 1 to {LARGEST_COUNT}")
        return value

    def number(self, name: str, *, above: float, default: float | None = None) -> float:
        """Return a finite number greater than `above`."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, "must be a number")
        if not above < value <= sys.float_info.max:
            raise self.error(name, f"must be a finite number greater than {above:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple, empty if absent."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in listed:
            is_whole = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not (is_whole and token_id in range(vocab_size)):
                raise self.error(
                    name, f"must be token ids from 0 to vocab_size - 1 = {vocab_size - 1}"
                )
        return tuple(listed)
