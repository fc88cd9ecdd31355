"""vLLM as a witness: the same prompts, with the connector and without, on an engine not our own."""
