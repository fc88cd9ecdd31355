"""A node's arena: its file, its tables, and what engines and the owner do with them.

Every process of the node uses it by itself, under one lock; `docs/arena_format.md` has the rules.
"""
