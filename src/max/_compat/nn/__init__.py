"""What `max.nn` has for programs of other versions only."""
