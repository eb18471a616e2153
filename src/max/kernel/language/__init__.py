"""What kernels are written in: its functions, their meaning in plain Python, and kernels as objects."""
