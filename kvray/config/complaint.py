"""What is wrong with a configuration, as one sentence with the fix."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from kvray.config.document import SettingPath
from kvray.config.environment import variable_of
from kvray.config.layers import Layers, Origin
from kvray.config.schema import setting_rows
from kvray.config.sections import NodeConfig
from kvray.config.values import shown

_NAME_MAX = 80
"""Characters of a name that are looked at and shown: a file may have any."""
_NEAR_ELSEWHERE = 0.75
"""How alike the name of a setting in another section must be, which is a bolder guess."""
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
"""What a value must be, by pydantic's name of the problem."""
_PATTERNS = {
    "cluster_name": "begin with a letter or a digit and have up to 32 of A-Z a-z 0-9 _ . -",
    "label": "be a label key=value, such as kvray.io/pool=big",
}


def explain(error: ValidationError, layers: Layers) -> str:
    """Return the first problem of `error` as one sentence with its place and its fix."""
    problems = error.errors()
    # A wrong name comes first: it may cause the other problems.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    path = tuple(str(part) for part in problem["loc"] if part != "[key]")
    if not path:
        message = problem["msg"].removeprefix("Value error, ")
        return f"These settings do not go together: {message}."
    origin = layers.origin_of(tuple(part.lower() for part in path))
    path = tuple(
        "".join(one if one.isprintable() else repr(one)[1:-1] for one in part)[:_NAME_MAX]
        for part in path
    )
    if origin.kind == "environment" and path[0] == "nodes":
        sentence = "The entries of nodes have no variables; write them in the configuration file."
    elif problem["type"] in ("extra_forbidden", "invalid_key"):
        sentence = _unknown(path, is_variable=origin.kind == "environment")
    else:
        sentence = _wrong_value(problem, path)
    return located(origin, sentence)


def located(origin: Origin, sentence: str) -> str:
    """Return a sentence behind the place that it is about."""
    return f"{origin.where}: {sentence}" if origin.where else sentence


def _unknown(path: SettingPath, *, is_variable: bool) -> str:
    *sections, key = path
    if "." in key:
        return f"{key} is no key of a file; write `{key.replace('.', ': {', 1)}: ...}}`."
    near = [variable_of(one) if is_variable else one for one in _nearest(sections, key)]
    known = ", ".join(_names_in(sections))
    hint = f"did you mean {' or '.join(near)}?" if near else f"remove it, or take one of {known}."
    return f"Unknown setting {'.'.join(path)}; {hint}"


def _nearest(sections: Sequence[str], key: str) -> list[str]:
    """Return the settings that may be meant: those beside it, else the best in other sections."""
    if near := difflib.get_close_matches(key.lower(), _names_in(sections), n=1):
        return [".".join((*sections, near[0]))]
    elsewhere = {
        row.name: max(_alike(key, row.name.rpartition(".")[2]), _alike(key, row.name))
        for row in setting_rows()
    }
    best = max(_NEAR_ELSEWHERE, *elsewhere.values())
    return [name for name, ratio in elsewhere.items() if ratio == best]


def _names_in(sections: Sequence[str]) -> list[str]:
    """Return the names of what can be set in a section, its sections included."""
    within = [part for part in sections if not part.isdigit()]
    if within == ["nodes"]:
        return sorted(NodeConfig.model_fields)
    if within[:1] == ["nodes"]:
        within = within[1:]  # its sections have the names of those at the top
    at = "".join(f"{part}." for part in within)
    names = (row.name.removeprefix(at) for row in setting_rows() if row.name.startswith(at))
    return sorted({name.partition(".")[0] for name in names})


def _alike(one: str, other: str) -> float:
    one, other = (name.lower().replace(".", "_").replace("-", "_") for name in (one, other))
    return difflib.SequenceMatcher(None, one, other).ratio()


def _wrong_value(problem: Mapping[str, Any], path: SettingPath) -> str:
    dotted, given, kind, said = ".".join(path), problem["input"], problem["type"], problem["msg"]
    # The default of a setting, which can always be written.
    default = {row.name: row.default for row in setting_rows()}.get(dotted)
    example = f", such as {default}" if default not in (None, "", "{}", "[]") else ""
    match kind:
        case "model_type":
            keys = ", ".join(_names_in(path))
            return f"{dotted} must be a section with keys, not {shown(given)}; its keys are {keys}."
        case "missing":
            return f"{dotted} is missing; name the nodes, such as `label: kvray.io/pool=big`."
        case _ if given is None:
            return f"{dotted} has no value; give it one{example}, or remove it."
        case "value_error":
            return f"{dotted}: {said.removeprefix('Value error, ')}."
        case "string_pattern_mismatch":
            form = _PATTERNS.get(path[-1], f"have the form {problem['ctx']['pattern']}")
            return f"{dotted} must {form}, not be {shown(given)}."
        case "literal_error":
            words = problem["ctx"]["expected"]
            return f"{dotted} must be {words}, not {shown(given)}{_meant(given, words)}"
        case "too_short":  # no setting asks for more than one
            return f"{dotted} must have at least {problem['ctx']['min_length']} entry{example}."
        case "too_long":
            return f"{dotted} must have at most {problem['ctx']['max_length']} entries{example}."
    must = _EXPECTED.get(kind) or said.removeprefix("Input should be ")
    if must == said:
        return f"{dotted} = {shown(given)} cannot be used: {said}{example}."
    is_plain = kind == "string_type" and not isinstance(given, dict | list)
    quote = "; put it in quotes" if is_plain else ""
    return f"{dotted} must be {must}{example}, not {shown(given)}{quote}."


def _meant(given: object, words: str) -> str:
    """Return which of the possible words is the nearest, and the sentence's end."""
    allowed = [one.strip("'") for one in words.replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(shown(given).strip("'").lower(), allowed, n=1)
    return f"; did you mean {near[0]}?" if near else "."
