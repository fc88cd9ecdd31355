"""The parts of kvray that live in a Ray cluster; each folder is a process or an organ of one.

Processes: `shard`, `mover`, `lookup`, `supervisor`; `staging` is an organ of the shard. Whichever
process starts, asks or ends a tier runs `tier`, `explain` and `owner`. All use `telemetry` and
`ray_glue`.
"""
