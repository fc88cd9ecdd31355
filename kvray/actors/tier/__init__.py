"""Starting, changing and ending a tier: runs in the process of a command or a client.

It makes the actors, or a Ray cluster of one node if there is none, and owns no state of its own.
"""
