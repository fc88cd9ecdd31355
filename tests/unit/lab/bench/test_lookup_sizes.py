from kvray.lab.bench.lookup_sizes import measure, size


def test_half_of_the_keys_costs_half_the_memory_and_less_time() -> None:
    costs = measure(32_000)
    one, two = size(costs, 1_000, 1), size(costs, 1_000, 2)
    assert two.num_bytes == one.num_bytes / 2
    assert one.told_s / 2 < two.told_s < one.told_s
    assert two.calls == one.calls, "each lookup hears every heartbeat"
    assert size(costs, 10_000, 1).told_s > 9 * one.told_s
