"""What stands at the end of each command's help: what people type, and what it ends with."""

_EXAMPLES = {
    "up": (
        "kvray up: a tier on a Ray of this machine's own.",
        "kvray up -c kvray.yaml --plan: what a changed configuration would have started anew.",
        "kvray up -c kvray.yaml --dashboard: with Ray's dashboard, whose address it prints.",
    ),
    "upgrade": (
        "kvray upgrade -c kvray.yaml --plan: which nodes run other code than they have installed.",
        "kvray upgrade -c kvray.yaml: one node after the other, with the blocks that are there.",
    ),
    "status": (
        "kvray status -c kvray.yaml",
        "kvray status --json | jq '.shards[].arena.blocks': the same for programs.",
    ),
    "doctor": (
        "kvray doctor -c kvray.yaml: this machine, the tier, and why tokens are missed.",
        "docker exec ENGINE kvray doctor --here -c /etc/kvray/kvray.yaml: what an engine sees.",
    ),
    "probe": ("kvray probe -c /etc/kvray/kvray.yaml --timeout 2: for a startupProbe.",),
    "prefetch": (
        "kvray prefetch prompt.json --replica replica-0: token ids, as one JSON list in the file.",
    ),
    "verify": ("kvray verify -c kvray.yaml: on the node whose memory is to be checked.",),
    "clear": ("kvray clear -c kvray.yaml --yes: without asking, in a script.",),
    "down": (
        "kvray down -c kvray.yaml: after what is in memory only was written to disk.",
        "kvray down -c kvray.yaml --no-flush: at once.",
    ),
    "sweep": (
        "kvray sweep --dry-run: what is there, who owns it and who uses it.",
        "kvray sweep: remove what nobody owns and nobody uses.",
    ),
    "connector-config": (
        "kvray connector-config -c /etc/kvray/kvray.yaml -o connector.yaml",
        "trtllm-serve MODEL --extra_llm_api_options connector.yaml",
    ),
    "replay": ("kvray replay trace.jsonl: which policy would have found how much of it.",),
    "demo": (
        "kvray demo: two replicas of a small model, and a verdict.",
        "kvray demo --plot demo.png: the same, and a picture of the first tokens.",
    ),
    "chaos": ("kvray chaos --duration 60 --seed 1: the same faults each time.",),
}
_STATUSES = (
    "Exit status: 0 done, and nothing is wrong; 1 what it judges does not hold; 2 it could not be"
    " done, or something does not work; 130 interrupted."
)


def epilog(command: str) -> str:
    """Return the end of a command's help."""
    return "\n\n".join(("Examples:", *_EXAMPLES[command], _STATUSES))
