"""Triton kernels of the depth read: one read by itself (single.py) and passes that sites share (all other files)."""
