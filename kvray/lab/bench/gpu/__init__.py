"""`kvray bench gpu`: copies between arenas and pages on a device, and a prefill that loads them."""
