"""HTTP without any API: middleware, event streams, the queue's limit, the application."""
