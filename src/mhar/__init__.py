"""Multi-Head Attention Residuals: depth routing for Transformers."""

__version__ = "0.1.0"
