"""Multi-token prediction by self-distillation (arXiv 2602.06019): the target itself learns to emit several tokens."""
