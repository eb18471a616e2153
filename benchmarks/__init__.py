"""Measurements: ours and the peer in the same run, interleaved, medians and ratios. `make bench` runs them all."""
