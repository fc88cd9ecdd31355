"""What the connector of every engine does: promise, load and save blocks of its node's tier.

No engine is named here and none is imported. A connector reads its engine's objects, and drives a
`Leader` where the engine schedules and a `RankWorker` where a rank has its pool.
"""
