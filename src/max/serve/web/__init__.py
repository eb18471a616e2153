"""The chat page at ``/`` and the page of the API at ``/docs``: their files, and nothing from another host."""
