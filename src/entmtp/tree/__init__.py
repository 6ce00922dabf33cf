"""Draft trees: topology, published defaults, banks."""
