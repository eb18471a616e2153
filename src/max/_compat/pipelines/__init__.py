"""What `max.pipelines` has for programs of other versions only."""
