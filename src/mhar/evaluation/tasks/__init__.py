"""Task files for lm-evaluation-harness over local JSON lines: its own prompts and metrics, without a network."""
