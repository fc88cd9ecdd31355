"""The parts of kvray that live in a Ray cluster: shards, the lookup, the supervisor."""
