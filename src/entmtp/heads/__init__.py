"""Draft heads: Medusa and Hydra forward, text by the target, training, native format."""
