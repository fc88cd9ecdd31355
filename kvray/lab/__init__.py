"""What tries, measures and attacks kvray; nothing but the command line imports it.

`reference` is a small real engine that calls a connector in TensorRT-LLM's order.
"""
