"""Offline work: rank traces, greedy search, recalibration, latency, throughput, banks."""
