"""The target model: loading, the fused and the generic forward, the KV cache."""
