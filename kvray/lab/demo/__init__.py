"""The demo: two replicas of a real language model share prefixes, and a verdict."""
