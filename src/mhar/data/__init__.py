"""Documents to tokenised, memory-mapped shards, and packed training windows whose order is a pure function.

`prepare.py` writes a prepared folder, `shards.py` reads one, `packing.py` cuts it into windows, `order.py` says which
window is sample g of a run, and `loader.py` feeds a training loop.
"""
