"""What scheduling can gain, and why: bounds, banks, signals and transfer, all by replay of finished runs."""
