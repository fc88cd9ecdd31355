"""Where each value of a configuration comes from, and what is wrong with it or with two of them."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from kvray.config.sections import (
    NOT_BY_LABEL,
    ArenaConfig,
    KVRayConfig,
    NodeConfig,
    setting_rows,
    variable_of,
)
from kvray.config.values import exact_size, shown
from kvray.errors import ConfigError

SettingPath = tuple[str, ...]
"""Names from the top on, as in ("arena", "capacity"); entries of a list by their number."""


class Origin(NamedTuple):
    """Where a value comes from."""

    kind: Literal["default", "file", "environment", "command line", "node"]
    where: str = ""
    """File and line, or the variable; empty if `kind` says everything."""

    def before(self, sentence: str) -> str:
        """Return a sentence with the place before it."""
        return f"{self.where}: {sentence}" if self.where else sentence


class Origins(dict[SettingPath, Origin]):
    """The origin of everything that was given, sections included; a later source wins."""

    def put(self, path: SettingPath, origin: Origin) -> None:
        """Note where a value comes from; a section belongs to the first source that has it."""
        for length in range(1, len(path)):
            self.setdefault(path[:length], origin)
        self[path] = origin

    def of(self, path: SettingPath, *, at_least: int = 1) -> Origin:
        """Return the origin of a value, else of a beginning of its path, `at_least` so long."""
        parts = (path[:length] for length in range(len(path), at_least - 1, -1))
        return next((self[part] for part in parts if part in self), Origin("default"))


_NAME_MAX = 80
"""Characters of a name that are looked at and shown: a file may have any."""
_NEAR_ELSEWHERE = 0.75
"""How alike the name of a setting in another section must be, which is a bolder guess."""
_EXPECTED = {
    "string_type": "a text",
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
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
_PAGE_BYTES = 4096
_SOCKET_PATH_MAX = 107
"""Bytes that the kernel takes for the path of a unix socket."""
_QUOTA_DIGITS = 8
"""Hex digits of a namespace's digest that the arena knows."""


def explain(error: ValidationError, origins: Origins) -> str:
    """Return the first problem of `error` as one sentence with its place and its fix."""
    problems = error.errors()
    # A wrong name comes first: it may cause the other problems.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    path = tuple(str(part) for part in problem["loc"] if part != "[key]")
    origin = origins.of(tuple(part.lower() for part in path))
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
    return origin.before(sentence)


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
    # An entry's sections have the names of those at the top.
    at = "".join(f"{part}." for part in within if part != "nodes")
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
            allowed = [one.strip("'") for one in words.replace(" or ", ", ").split(", ")]
            near = difflib.get_close_matches(shown(given).strip("'").lower(), allowed, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            return f"{dotted} must be {words}, not {shown(given)}{meant}"
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


Contradictions = Iterator[tuple[SettingPath, str]]
"""The setting that is best changed, and the sentence with what to do about it."""


def refuse_first(found: Contradictions, origins: Origins) -> None:
    """Raise ConfigError for the first contradiction, if there is one."""
    for path, sentence in found:
        raise ConfigError(origins.of(path).before(sentence))


def contradictions(config: KVRayConfig) -> Contradictions:
    """Yield the contradictions in what holds on one node."""
    yield from _in_arena(config.arena)
    yield from _in_nvme(config)
    shard, ways, security = config.shard, config.staging.transports, config.security
    if shard.heartbeat_s >= shard.silent_s:
        yield (
            ("shard", "silent_s"),
            f"A shard would count as silent ({shard.silent_s:g} s, shard.silent_s) between two"
            f" heartbeats ({shard.heartbeat_s:g} s, shard.heartbeat_s); raise shard.silent_s to"
            f" {3 * shard.heartbeat_s:g}.",
        )
    if len(unique := list(dict.fromkeys(ways))) < len(ways):
        says = "staging.transports names one transport twice"
        yield ("staging", "transports"), f"{says}; write [{', '.join(unique)}]."
    length = len(os.fsencode(config.node_dir / "socket"))
    if length > _SOCKET_PATH_MAX:
        yield (
            ("arena", "dir"),
            f"The path of the shard's socket in {config.node_dir} would have {length} bytes, and"
            f" the kernel takes {_SOCKET_PATH_MAX}; shorten arena.dir or cluster_name.",
        )

    # Blocks count for their tenant or, without tenants, for their namespace.
    section, says = "security", "needs security.tenant_secret_file; set it too."
    if security.tenant_secret_file:
        section, says = "arena", "bounds no tenants; set security.tenant_quota in its place."
    for name in ("namespace_quota", "quotas", "tenant_quota", "tenant_quotas"):
        if getattr(getattr(config, section), name, None):
            yield (section, name), f"{section}.{name} {says}"


def quota_contradictions(config: KVRayConfig) -> Contradictions:
    """Yield the quotas that are no bound on any node: a mistake in one of the two."""
    largest = max(values_on_nodes(config, "arena", "capacity"))
    arena, security = config.arena, config.security
    quotas: dict[SettingPath, int | None] = {
        ("arena", "namespace_quota"): arena.namespace_quota,
        ("security", "tenant_quota"): security.tenant_quota,
        **{("arena", "quotas", name): size for name, size in arena.quotas.items()},
        **{("security", "tenant_quotas", name): n for name, n in security.tenant_quotas.items()},
    }
    for path, size in quotas.items():
        if size is not None and size > largest:
            says = f"{'.'.join(path)} ({exact_size(size)}) is larger than arena.capacity"
            says += f" ({exact_size(largest)}) and would bound nothing"
            yield path, f"{says}; lower it, or raise arena.capacity."


def node_contradictions(entry: NodeConfig, index: int) -> Contradictions:
    """Yield what an entry of `nodes` may not say, or that it says nothing."""
    at = ("nodes", str(index))
    for dotted in NOT_BY_LABEL:
        section, _, name = dotted.partition(".")
        if name in getattr(entry, section):
            says = f"{dotted} cannot differ by label, because engines do not know Ray's labels"
            where = "in the environment of the node's Ray and of its engines"
            yield (*at, section, name), f"{says}; set {variable_of(dotted)} {where}."
    if not entry.arena and not entry.nvme:
        says = f"The entry for {entry.label} in nodes changes nothing"
        yield at, f"{says}; give it settings in arena or nvme, or remove it."


def values_on_nodes(config: KVRayConfig, section: str, name: str) -> list[Any]:
    """Return every value that a setting has on some node by its label, the tier's own first."""
    own = getattr(getattr(config, section), name)
    given = [getattr(entry, section) for entry in config.nodes]
    return [own, *(one[name] for one in given if name in one)]


def _in_arena(arena: ArenaConfig) -> Contradictions:
    capacity, slab, slot_min = (
        f"arena.{name} ({exact_size(getattr(arena, name))})"
        for name in ("capacity", "slab", "slot_min")
    )
    if arena.slot_min > arena.capacity:
        yield ("arena", "capacity"), f"{capacity} has no room for {slot_min}; raise arena.capacity."
    if arena.slot_min > arena.slab:
        says = f"{slab} is smaller than {slot_min}, but slots are cut from slabs"
        yield ("arena", "slab"), f"{says}; raise arena.slab, or lower arena.slot_min."
    if "slab" in arena.model_fields_set and arena.slab > arena.capacity:
        says = f"{slab} is larger than {capacity}"
        yield ("arena", "slab"), f"{says}; lower arena.slab, or leave it out."
    known: dict[str, str] = {}
    for name in arena.quotas:
        other = known.setdefault(name[:_QUOTA_DIGITS], name)
        if other != name:
            says = f"arena.quotas has {other} and {name}, and kvray compares the first"
            says += f" {_QUOTA_DIGITS} digits only; keep one of the two."
            yield ("arena", "quotas", name), says


def _in_nvme(config: KVRayConfig) -> Contradictions:
    nvme, slot_min = config.nvme, config.arena.slot_min
    segment = f"nvme.segment ({exact_size(nvme.segment)})"
    slots = f"arena.slot_min ({exact_size(slot_min)})"
    if nvme.segment >= nvme.capacity:
        says = f"nvme.capacity ({exact_size(nvme.capacity)}) has no room for one file of {segment}"
        says += " with its table; lower nvme.segment, or raise nvme.capacity."
        yield ("nvme", "segment"), says
    if nvme.dir is None:
        return
    if slot_min % _PAGE_BYTES:
        says = f"{slots} must be a multiple of 4KiB for blocks on disk"
        yield ("arena", "slot_min"), f"{says}; write {_multiple(slot_min, _PAGE_BYTES)}."
    if nvme.segment % slot_min:
        says = f"{segment} must be a multiple of {slots}"
        yield ("nvme", "segment"), f"{says}; write {_multiple(nvme.segment, slot_min)}."
    reached = 1 - config.arena.free_target
    if nvme.high_watermark >= reached:
        says = f"nvme.high_watermark ({nvme.high_watermark:g}) is never reached, because"
        says += f" arena.free_target ({config.arena.free_target:g}) keeps the arena at most"
        yield ("nvme", "high_watermark"), f"{says} {reached:g} full; lower one of the two."


def _multiple(size: int, unit: int) -> str:
    return exact_size(-(-size // unit) * unit)
