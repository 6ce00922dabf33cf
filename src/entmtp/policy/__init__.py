"""Policies: what picks a tree at each step, from signals of this very position."""
