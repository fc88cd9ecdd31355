"""What is wrong with a setting, as one sentence with the fix."""

import difflib
from typing import Any

from pydantic import ValidationError

from kvray.config.sections import KVRayConfig


def explain(error: ValidationError) -> str:
    """Return the first problem of `error` as one sentence with the fix."""
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"These settings do not go together: {message}."
    *sections, key = (str(part) for part in problem["loc"])
    dotted = ".".join([*sections, key])
    if problem["type"] == "extra_forbidden":
        known = _keys_of(sections)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*sections, near[0]])}?" if near else "remove it."
        return f"Unknown setting {dotted}; {hint} {_listed(known)}"
    if problem["type"] == "model_type":
        known = _keys_of([*sections, key])
        return f"{dotted} must be a section with keys, not {problem['input']!r}. {_listed(known)}"
    return f"Setting {dotted} = {problem['input']!r} cannot be used: {message}."


def _keys_of(sections: list[str]) -> list[str]:
    model: Any = KVRayConfig
    for section in sections:
        model = model.model_fields[section].annotation
    return list(model.model_fields)


def _listed(known: list[str]) -> str:
    return f"Known here: {', '.join(sorted(known))}."
