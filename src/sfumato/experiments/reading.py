"""What the files of experiments are read with: strictly, and tables laid over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sfumato.reading import check_keys, read, suggestion

__all__ = ["check_keys", "merged", "read", "suggestion"]


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Later tables win, key by key, also inside tables."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            before = result.get(key)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result
