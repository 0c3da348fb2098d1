"""The recipe: pretraining and mid-training of any causal model on PyTorch's own distributed stack.

`recipe.py` is the loop; `config.py` says what a run file may hold, and each other file is one part of the loop.
"""
