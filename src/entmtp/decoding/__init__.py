"""Decoding: noise, verification rules, the step loop, plain decoding."""
