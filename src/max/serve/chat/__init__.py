"""Conversations, whatever API they come by: the request, its tokens, the parts of the answer."""
