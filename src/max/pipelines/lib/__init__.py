"""The parts that pipelines are made of; `max.pipelines` has the common names."""
