"""The help pages: flowing text, examples to copy and exit statuses, within 80 columns."""

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

_Examples = tuple[tuple[str, str], ...]
"""What each example is for, and the line to type."""

_EXAMPLES: dict[str, _Examples] = {
    "up": (
        ("Start a tier on a Ray of its own on this machine", "kvray up"),
        ("See what it would start or restart, and the memory", "kvray up -c kvray.yaml --plan"),
        ("Restart what other settings or newly installed code concern", "kvray up -c kvray.yaml"),
        ("Start Ray's dashboard too, and print its address", "kvray up --dashboard"),
    ),
    "down": (
        ("Write blocks to disk, then end the tier", "kvray down -c kvray.yaml"),
        ("End it at once", "kvray down -c kvray.yaml --no-flush"),
    ),
    "drain": (
        ("Before a machine is taken away in a minute", "kvray drain gpu-07 --deadline 1m"),
        ("It stays after all", "kvray drain gpu-07 --cancel"),
    ),
    "clear": (("Ask no question, in a script", "kvray clear -c kvray.yaml --yes"),),
    "prefetch": (("Bring a prompt to its node", "kvray prefetch prompt.json --replica replica-0"),),
    "sweep": (
        ("See the arenas, their owners and their users", "kvray sweep --dry-run"),
        ("Remove the arenas without owner and users", "kvray sweep"),
    ),
    "connector-config": (
        (
            "Write the file, and serve with it",
            "kvray connector-config -c /etc/kvray/kvray.yaml -o connector.yaml\n"
            "trtllm-serve MODEL --extra_llm_api_options connector.yaml",
        ),
    ),
    "config show": (("Show what differs from the defaults", "kvray config show --changed"),),
    "config schema": (("Give it to an editor", "kvray config schema > kvray.schema.json"),),
    "status": (
        ("Look at the tier", "kvray status -c kvray.yaml"),
        ("Look at it until Ctrl-C", "kvray status --watch"),
        ("Use one figure in a script", "kvray status --json | jq '.shards[].arena.blocks'"),
    ),
    "ls": (
        ("List every namespace", "kvray ls"),
        ("List the 20 prefixes of one that are used most", "kvray ls 3f0a91c2"),
        ("List a hundred, for a program", "kvray ls 3f0a91c2 --hottest 100 --json"),
    ),
    "explain": (
        ("Explain the latest request of any replica", "kvray explain --last"),
        ("List the latest 20 of one replica", "kvray explain --last 20 --replica replica-0"),
        ("Explain the request that the engine calls 4711", "kvray explain 4711"),
        ("Say what is stored of a prompt now", "kvray explain --tokens prompt.json"),
    ),
    "size": (
        ("Say what twice the memory would bring", "kvray size"),
        ("Say it by the prompts until now, not by the last curve", "kvray size --now"),
        ("Compare sizes, and draw them", "kvray size --add 64GiB --add 256GiB --plot size.png"),
    ),
    "doctor": (
        ("Check this machine, the tier, and why tokens are missed", "kvray doctor -c kvray.yaml"),
        ("Check what an engine's container sees", "docker exec ENGINE kvray doctor --here"),
    ),
    "probe": (("Use it as a startupProbe", "kvray probe -c /etc/kvray/kvray.yaml --timeout 2s"),),
    "verify": (("Check the memory of this node", "kvray verify -c kvray.yaml"),),
    "dashboard install": (
        ("Put it into the Grafana of the tier's Ray", "kvray dashboard install"),
        ("Put it into another Grafana", "kvray dashboard install --to DIR"),
    ),
    "dashboard serve": (("Show the tier on a page, until Ctrl-C", "kvray dashboard serve"),),
    "dashboard scrape": (("Set Prometheus up", "kvray dashboard scrape > kvray.yml"),),
    "dashboard rules": (("Write the alerts to a file", "kvray dashboard rules > alerts.yml"),),
    "dashboard show": (("Write the dashboard to a file", "kvray dashboard show > kvray.json"),),
    "demo": (
        ("Let two replicas of a small model share prefixes", "kvray demo"),
        ("Draw their first tokens, too", "kvray demo --plot demo.png"),
    ),
    "bench local": (("Measure this node", "kvray bench local"),),
    "bench gpu": (("Measure the first GPU", "kvray bench gpu"),),
    "bench staging": (("Measure the way between two nodes", "kvray bench staging"),),
    "bench tier": (("Measure a full arena, two processes", "kvray bench tier --processes 2"),),
    "bench nvme": (("Measure a disk", "kvray bench nvme --dir /mnt/nvme"),),
    "bench serve": (
        ("Compare two servers", "kvray bench serve --url a=http://a:8000 --url b=http://b:8000"),
        ("Compare routers on this machine", "kvray bench serve --local"),
    ),
    "chaos": (("Repeat the same minute of faults", "kvray chaos --duration 1m --seed 1"),),
    "replay": (
        ("Compare the policies on a trace", "kvray replay trace.jsonl"),
        ("Compare routers of 8 replicas", "kvray replay trace.jsonl --replicas 8 --speed 3"),
    ),
}
_DONE = "done, and nothing is wrong"
_FAILED = "it could not be done, or an option is wrong"
_STATUSES: dict[str, dict[int, str]] = {
    "chaos": {1: "a check failed: a wrong token, a dead engine or a request that hung"},
    "clear": {1: "you answered no"},
    "demo": {1: "a check failed: a token differed, or a prefix was not shared"},
    "doctor": {0: "no fault was found", 2: "something does not work, or an option is wrong"},
    "explain": {0: "there is an answer, good or bad", 2: "nothing is known, or no tier runs"},
    "probe": {0: "the shard serves", 1: "a check failed: the shard does not serve"},
    "status": {0: "the tier answered; with --watch: you ended it", 2: "no tier answers"},
    "sweep": {1: "something could not be removed"},
    "verify": {1: "a check failed: corrupt blocks or damaged tables"},
}
"""What a status means, where a command has its own word for it."""


class _Readable:
    """Flags and arguments show no type, numbers N, and other options their name in capitals.

    Every option says its default. Bounds are told to those who miss them.
    """

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if isinstance(one, TyperArgument):
                one.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif getattr(one, "is_flag", False):
                one.metavar = ""
            elif one.metavar is None:
                is_number = getattr(one, "min", None) is not None
                one.metavar = "N" if is_number else str(one.name).upper()
            elif one.metavar == "TIME" and isinstance(one.default, int | float):
                one.default = f"{one.default:g}s"
            if one.default is None and one.show_default is True:
                one.show_default = "none"
            one._get_number_range_help_str = lambda: None
        return params


class Command(_Readable, TyperCommand):
    """A command whose help ends with its examples and its exit statuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Let each paragraph of the docstring flow."""
        super().__init__(*args, **kwargs)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help page."""
        self.epilog = epilog(ctx.command_path.partition(" ")[2])
        super().format_help(ctx, formatter)


class Group(_Readable, TyperGroup):
    """A command that has commands below it."""


def epilog(command: str) -> str:
    """Return the end of a command's help, such as "up" or "bench local"."""
    lines = ["Examples:"]
    for purpose, typed in _EXAMPLES.get(command, ()):
        lines += [f"  # {purpose}", *(f"  {line}" for line in typed.split("\n"))]
    meanings = {0: _DONE, 2: _FAILED, 130: "interrupted"} | _STATUSES.get(command, {})
    statuses = [f"  {status:<3}  {meanings[status]}" for status in sorted(meanings)]
    return "\n".join([*(lines if len(lines) > 1 else []), "", "Exit status:", *statuses])
