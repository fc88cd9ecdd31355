"""What one engine counts and measures of itself, for its shard to show."""
