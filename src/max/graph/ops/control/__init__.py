"""Control flow, and ops with side effects: branches, loops, calls, buffers, printing, custom ops."""
