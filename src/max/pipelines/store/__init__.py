"""The models on this machine: where they are, and how they get there."""
