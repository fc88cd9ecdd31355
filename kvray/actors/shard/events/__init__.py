"""KV events of a shard: what its node's tiers hold, with the tokens, for routers."""
