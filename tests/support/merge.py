"""JSON merge patches (RFC 7396), by which cases say what differs from a document."""

from __future__ import annotations

from typing import Any


def patched(document: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = patched(result.get(key), value)
    return result
