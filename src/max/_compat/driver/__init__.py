"""What `max.driver` has for programs of other versions only."""
