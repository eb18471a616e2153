"""What `max.experimental` has for programs of other versions only."""
