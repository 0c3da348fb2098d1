"""Operator and training-step benchmarks against the alternatives, gated on correctness."""
