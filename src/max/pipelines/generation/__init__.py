"""Text generation: the pipeline that runs batches, and the driver that makes batches of requests."""
