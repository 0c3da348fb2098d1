"""Held-out loss, benchmark tasks with per-item records, and paired statistics between models."""
