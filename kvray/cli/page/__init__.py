"""`kvray dashboard serve`: the tier on a page for browsers."""
