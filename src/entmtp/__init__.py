"""EntMTP: entropy-guided scheduling of draft trees for multi-token prediction, lossless and replayable."""

__version__ = "0.1.0"
