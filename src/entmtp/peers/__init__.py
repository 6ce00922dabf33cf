"""What a user would pick instead, on the same model and prompts: `python -m entmtp.peers.bench`."""
