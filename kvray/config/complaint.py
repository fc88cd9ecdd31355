"""What is wrong with a configuration, as one sentence with the fix."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from kvray.config.document import SettingPath
from kvray.config.environment import variable_of
from kvray.config.layers import Layers, Origin
from kvray.config.nearest import names_in, nearest
from kvray.config.schema import setting_rows
from kvray.config.values import shown

Problem = Mapping[str, Any]

_NAME_MAX = 80
"""Characters of a name that are looked at and shown: a file may have any."""

_EXPECTED = {
    "string_type": "a text",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "dict_type": "a mapping of names to values",
    "tuple_type": "a list",
    "path_type": "a path",
}
"""What a value must be, by what pydantic calls the problem."""
_PATTERNS = {
    "cluster_name": "begin with a letter or a digit and have up to 32 of A-Z a-z 0-9 _ . -",
    "label": "be a label key=value, such as kvray.io/pool=big",
}


def explain(error: ValidationError, layers: Layers) -> str:
    """Return the first problem of `error` as one sentence with place and fix."""
    problems = error.errors()
    # A wrong name comes first: what else is wrong may follow from it.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    path = tuple(str(part) for part in problem["loc"] if part != "[key]")
    if not path:
        message = problem["msg"].removeprefix("Value error, ")
        return f"These settings do not go together: {message}."
    origin = layers.origin_of(tuple(part.lower() for part in path))
    path = tuple(part[:_NAME_MAX] for part in path)
    for describe in (_no_variable, _unknown, _no_section, _missing, _empty):
        if (sentence := describe(problem, path, origin)) is not None:
            return located(origin, sentence)
    return located(origin, _wrong_value(problem, path))


def located(origin: Origin, sentence: str) -> str:
    """Return a sentence behind the place that it is about."""
    return f"{origin.where}: {sentence}" if origin.where else sentence


def _no_variable(problem: Problem, path: SettingPath, origin: Origin) -> str | None:
    if origin.kind != "environment" or path[0] != "nodes":
        return None
    return "The entries of nodes have no variables; write them in the configuration file."


def _unknown(problem: Problem, path: SettingPath, origin: Origin) -> str | None:
    if problem["type"] not in ("extra_forbidden", "invalid_key"):
        return None
    *sections, key = path
    is_variable = origin.kind == "environment"
    name: Callable[[str], str] = variable_of if is_variable else str
    near = [name(one) for one in nearest(sections, key)]
    if "." in key:
        return f"{key} is no key of a file; write `{key.replace('.', ': {', 1)}: ...}}`."
    known = ", ".join(names_in(sections))
    hint = f"did you mean {' or '.join(near)}?" if near else f"remove it, or take one of {known}."
    return f"Unknown setting {'.'.join(path)}; {hint}"


def _no_section(problem: Problem, path: SettingPath, origin: Origin) -> str | None:
    if problem["type"] != "model_type":
        return None
    return (
        f"{'.'.join(path)} must be a section with keys, not {shown(problem['input'])}; its keys are"
        f" {', '.join(names_in(path))}."
    )


def _missing(problem: Problem, path: SettingPath, origin: Origin) -> str | None:
    if problem["type"] != "missing":
        return None
    return f"{'.'.join(path)} is missing; say for which nodes, such as `label: kvray.io/pool=big`."


def _empty(problem: Problem, path: SettingPath, origin: Origin) -> str | None:
    """Answer a key that nothing follows."""
    if problem["input"] is not None:
        return None
    return f"{'.'.join(path)} has no value; give it one{_for_example(path)}, or remove it."


def _wrong_value(problem: Problem, path: SettingPath) -> str:
    dotted, given, kind = ".".join(path), problem["input"], problem["type"]
    said = problem["msg"]
    if kind == "value_error":
        return f"{dotted}: {said.removeprefix('Value error, ')}."
    if kind == "string_pattern_mismatch":
        form = _PATTERNS.get(path[-1], f"have the form {problem['ctx']['pattern']}")
        return f"{dotted} must {form}, not be {shown(given)}."
    if kind == "literal_error":
        return f"{dotted} must be {problem['ctx']['expected']}, not {shown(given)}{_meant(problem)}"
    if kind in ("too_short", "too_long"):
        return f"{dotted} must have {_number_of_entries(problem['ctx'])}{_for_example(path)}."
    must = _EXPECTED.get(kind) or said.removeprefix("Input should be ")
    if must == said:
        return f"{dotted} = {shown(given)} cannot be used: {said}{_for_example(path)}."
    is_plain = kind == "string_type" and not isinstance(given, dict | list)
    quote = "; put it in quotes" if is_plain else ""
    return f"{dotted} must be {must}{_for_example(path)}, not {shown(given)}{quote}."


def _number_of_entries(bounds: Mapping[str, Any]) -> str:
    """Return how many entries a list or a mapping may have."""
    if "min_length" in bounds:
        return f"at least {bounds['min_length']} entry"  # no setting asks for more
    return f"at most {bounds['max_length']} entries"


def _meant(problem: Problem) -> str:
    """Return which of the words that may stand there is the nearest, and the sentence's end."""
    allowed: Sequence[str] = problem["ctx"]["expected"].replace(" or ", ", ").split(", ")
    given = shown(problem["input"]).strip("'").lower()
    near = difflib.get_close_matches(given, [one.strip("'") for one in allowed], n=1)
    return f"; did you mean {near[0]}?" if near else "."


def _for_example(path: SettingPath) -> str:
    """Return the default of a setting, which can always be written; "" if there is none."""
    default = {row.name: row.default for row in setting_rows()}.get(".".join(path))
    return f", such as {default}" if default not in (None, "", "{}", "[]") else ""
